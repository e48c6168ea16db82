"""Host memory of an exact size for experts: private to a worker, or shared by the replicas of a host.

A shared region is a file below /dev/shm named by its content. The first replica fills it under a lock and marks it
complete; others wait for that and map it; it outlives a replica's restart, and :func:`remove_shared` ends it. A file
of another size under the name makes way for a new one, and stays with those who have it mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from memory.device.huge_pages import ask_for_huge_pages

log = logging.getLogger(__name__)

SHARED_FOLDER = Path("/dev/shm")
_HEADER_BYTES = 4096
_COMPLETE = b"headroom experts, complete"
_MADV_POPULATE_WRITE = 23
POPULATED_BYTES = 1 << 28
"""What a thread lays out at a time."""
MAX_POPULATING = 16


class HostRegion:
    """``num_bytes`` of zeroed, page-aligned host memory.

    Attributes:
        data: [num_bytes] uint8 over it.
        is_filled: whether another worker has already put the content there.
    """

    def __init__(self, num_bytes: int, shared_name: str | None = None) -> None:
        """Maps anonymous memory, or with ``shared_name`` the shared file, waiting while another worker fills it."""
        self._file: int | None = None
        self.is_filled = False
        skip = 0
        if shared_name is None:
            self._map = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            skip = _HEADER_BYTES
            self._map = self._open_shared(SHARED_FOLDER / f"headroom-{shared_name}", num_bytes + skip)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.data = whole[skip : skip + num_bytes]

    def _open_shared(self, path: Path, num_bytes: int) -> mmap.mmap:
        while True:
            self._file = self._lock(path)
            size = os.fstat(self._file).st_size
            if size in (0, num_bytes) and _is_at(self._file, path):
                break
            if _is_at(self._file, path):
                # Other blocks. Workers that read them keep them: cut short, the file would kill those.
                path.unlink()
            self.close()
        if not size:
            self._check_room(num_bytes)
            os.ftruncate(self._file, num_bytes)
        found = mmap.mmap(self._file, num_bytes)
        self.is_filled = found[: len(_COMPLETE)] == _COMPLETE
        if self.is_filled:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return found

    def _lock(self, path: Path) -> int:
        """The file at ``path``, made if need be, once nobody else fills it; PermissionError for another user's."""
        # The folder is everybody's: a link, or a file that another user put there, is not to be trusted with weights.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(file).st_uid != os.geteuid():
            os.close(file)
            raise PermissionError(
                f"host_store=shared: {path} belongs to another user; use host_store=private"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another worker to fill %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _check_room(self, num_bytes: int) -> None:
        """OSError where the shared folder cannot hold the file: a write beyond its end would kill the process."""
        assert self._file is not None
        found = os.fstatvfs(self._file)
        room = found.f_bavail * found.f_frsize
        if room < num_bytes:
            self.close()
            raise OSError(
                f"host_store=shared: {SHARED_FOLDER} has room for {room / 1e9:.2f} GB, and the experts need"
                f" {num_bytes / 1e9:.2f} GB; give it more (docker: --shm-size), or use host_store=private"
            )

    def complete(self) -> None:
        """The content is there: lets other workers in. Does nothing for a private region or one found filled."""
        if self._file is None or self.is_filled:
            return
        self._map[: len(_COMPLETE)] = _COMPLETE
        self.is_filled = True
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Lets the lock and the file go; the bytes stay mapped as long as tensors look at them."""
        if self._file is not None:
            # Said, not left to close(): the mapping holds a duplicate of the file, and with it the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> HostRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at ``path``: it may have been removed while its lock was waited for."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file), there)


def remove_shared(name: str) -> bool:
    """Removes a shared region's file; workers that have it mapped keep it. False if there is none."""
    try:
        (SHARED_FOLDER / f"headroom-{name}").unlink()
    except FileNotFoundError:
        return False
    return True


def populate(data: torch.Tensor) -> bool:
    """Lays out the pages of host memory before they are used, by several threads, in huge pages where the machine gives
    them: a driver that pins does so one by one. What lies there is left alone. False where the system does not know
    how; the pages then come as they are touched."""
    if sys.platform != "linux" or data.numel() == 0:
        return False
    ask_for_huge_pages(data)
    first = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    last = -(-(data.data_ptr() + data.numel()) // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def lay_out(start: int) -> bool:
        return bool(madvise(start, min(POPULATED_BYTES, last - start), _MADV_POPULATE_WRITE) == 0)

    with ThreadPoolExecutor(min(MAX_POPULATING, os.cpu_count() or 1)) as threads:
        return all(threads.map(lay_out, range(first, last, POPULATED_BYTES)))


def pin(data: torch.Tensor) -> str | None:
    """Registers host memory with the GPU's driver, mapped, at its exact size. None when done, else why it failed; the
    driver's error is cleared, so that later calls do not stumble over it."""
    runtime = torch.cuda.cudart()
    mapped_and_portable = 3
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), mapped_and_portable))
    if code == 0:
        return None
    _clear_error()
    return (
        f"the driver refused to pin {data.numel() / 1e9:.1f} GB of host memory (CUDA error {code}): see `ulimit -l`;"
        " under WSL2 about half of the machine's memory can be pinned"
    )


def _clear_error() -> None:
    """Lets a launch meet the driver's last error, which ends it: torch has no other call that does."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def unpin(data: torch.Tensor) -> None:
    """Ends what :func:`pin` began, when the kernels that read it are done. Memory that is unmapped while registered
    stays pinned."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(data.data_ptr())
