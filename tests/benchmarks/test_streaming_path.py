"""The streaming benchmark's client and figures, against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.streaming import client
from benchmarks.streaming.client import Load, Measured, first_length, measure
from benchmarks.streaming.processes import cpu_seconds
from benchmarks.streaming.server import SCRIPTED, write_model
from benchmarks.streaming_path import figures_of, load_of, pace_of
from serve_app.text.model_folder import FAKE_MODEL
from worker.engines.fake_script import read_script


async def _serve(cut: int = 0, still: bool = False) -> asyncio.Server:
    """Answers every request with as many letters as it asks for, in messages of 1, 3, 4 and 4 letters, 20 ms apart;
    ``cut``: without the last message; ``still``: without an end, too."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        assert body["stream"] is True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        text = "abcdefghijkl"[: body["max_tokens"]]
        pieces = [piece for piece in (text[:1], text[1:4], text[4:8], text[8:]) if piece]
        for piece in pieces[: len(pieces) - cut]:
            event = b'data: {"choices":[{"index":0,"text":"%s","finish_reason":null}]}\n\n' % piece.encode()
            chunk = b"%x\r\n%s\r\n" % (len(event), event)
            writer.write(chunk[:25])  # a message may arrive in pieces
            await asyncio.sleep(0.005)
            writer.write(chunk[25:])
            await asyncio.sleep(0.015)
        if still:
            await asyncio.sleep(60)
        if not cut:
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def _run(cut: int = 0, still: bool = False) -> tuple[Measured, Load]:
    async def run() -> tuple[Measured, Load]:
        server = await _serve(cut, still)
        async with server:
            load = Load(server.sockets[0].getsockname()[1], 4, 12, 0.1, 0.0, 0.8)
            return await measure(load, lambda: {"client": 0.0}), load

    return asyncio.run(run())


def test_tokens_gaps_and_first_tokens_are_counted() -> None:
    measured, load = _run()
    assert not measured.failures
    assert set(measured.sizes) <= {1, 2, 3, 4}
    assert measured.num_tokens == sum(measured.sizes)
    assert measured.num_messages == len(measured.sizes) > 10
    assert 0.0 < min(measured.first_token_s) < 0.5
    # On a busy machine two messages may be read at once.
    assert client.quantile(measured.gaps_s, 0.5) > 0.01
    figures = figures_of(measured, load, pace_of(4, 1e9))
    assert figures["tokens_per_s"] == pytest.approx(measured.num_tokens / 0.8)
    assert figures["begun_per_s"] == pytest.approx(len(measured.first_token_s) / 0.8)
    assert figures["message_tokens_max"] == 4
    assert figures["offered_tokens_per_s"] == 800.0


def test_a_stream_that_brings_too_little_is_a_failure() -> None:
    measured, load = _run(cut=1)
    assert measured.failures
    assert any("8 of 12" in sentence for sentence in measured.failures)
    assert figures_of(measured, load, pace_of(4, 1e9))["failures"] > 0


def test_a_stream_that_stands_still_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STILL_S", 0.3)
    assert len(_run(still=True)[0].failures) == 4


def test_what_was_not_measured_is_no_figure() -> None:
    figures = figures_of(Measured(), Load(80, 4, 12), pace_of(4, 1e9))
    assert figures["tokens_per_s"] == figures["begun_per_s"] == 0.0
    assert not [name for name in figures if name.endswith(("p50", "p99"))]
    with pytest.raises(ValueError, match="nothing was measured"):
        client.quantile([], 0.5)


def test_the_first_streams_end_evenly() -> None:
    assert [first_length(Load(80, 4, 12), number) for number in range(4)] == [3, 6, 9, 12]
    assert [first_length(Load(80, 4, 2), number) for number in range(4)] == [1, 1, 1, 2]


@pytest.mark.parametrize(("streams", "per_stream"), [(1, 200.0), (256, 200.0), (1_000, 56.0)])
def test_the_pace_is_bounded_per_stream_and_in_all(streams: int, per_stream: float) -> None:
    assert pace_of(streams, 56_000.0).tokens_per_s == pytest.approx(per_stream)


@pytest.mark.parametrize(
    ("streams", "tokens", "ramp_s"), [(1, 600, 3.0), (256, 2_048, 10.24), (1_000, 2_240, 40.0)]
)
def test_streams_are_long_enough_that_few_begin_at_once(streams: int, tokens: int, ramp_s: float) -> None:
    load = load_of(80, pace_of(streams, 56_000.0), 5.0)
    assert (load.tokens_per_stream, load.ramp_s) == (tokens, pytest.approx(ramp_s))


def test_the_model_says_letters_at_the_pace(tmp_path: Path) -> None:
    write_model(tmp_path / "m", FAKE_MODEL, 123.0, 0.004)
    script = read_script(tmp_path / "m")
    assert bytes(script.token_ids).decode() == SCRIPTED
    assert script.tokens_per_s == 123.0
    assert (tmp_path / "m" / "tokenizer.json").is_file()


def test_processor_time_is_of_the_servers_processes_and_our_own() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = cpu_seconds(child.pid)
        assert used["rest"] >= 0.25
        assert used["client"] >= sum(os.times()[:2]) * 0.5
        assert cpu_seconds(1 << 30).keys() == {"client"}
        child.communicate("\n")
