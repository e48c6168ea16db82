"""Scoring over HTTP, against a small server that is right, wrong, slow or broken on purpose."""

from __future__ import annotations

import json
import lzma
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import final_number, main, messages, parse_endpoint, read_questions
from benchmarks.intervals import paired_difference, wilson_interval


class Server(ThreadingHTTPServer):
    """Answers question "What is n + n?" with 2n, except for the numbers in ``wrong``; 400 for those in ``broken``."""

    daemon_threads = True

    def __init__(self, wrong: frozenset[int] = frozenset(), broken: frozenset[int] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong, self.broken = wrong, broken
        self.lock = threading.Lock()
        self.at_once = self.most_at_once = 0
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(
            200,
            {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]},
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        time.sleep(0.01)
        number = int(body["messages"][-1]["content"].split()[2])
        with self.server.lock:
            self.server.at_once -= 1
        if number in self.server.broken:
            self.reply(
                400,
                {"error": {"message": "no", "type": "invalid_request_error", "code": None, "param": None}},
            )
            return
        answer = 2 * number + (number in self.server.wrong)
        message = {"role": "assistant", "content": f"{number} + {number} = {answer}\n#### {answer:,}.00"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
        head = {"id": "c", "object": "chat.completion", "created": 0, "model": "tiny"}
        self.reply(200, {**head, "choices": [choice], "usage": usage})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(**options: frozenset[int]) -> Server:
        servers.append(Server(**options))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        json.dumps(
            {
                "question": f"What is {n} + {n} ?",
                "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n:,}",
            }
        )
        for n in range(500, 520)
    ]
    path = tmp_path / "test.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return path


def test_two_endpoints_are_scored_and_compared(
    serve: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resident, paged = serve(wrong=frozenset({501, 502})), serve(wrong=frozenset({502, 503, 504}))
    shots = ["--shots", "2", "--shots-data", str(data)]
    endpoints = ["--endpoint", f"resident={resident.url}", "--endpoint", f"paged={paged.url},tiny"]
    report_to = ["--json", str(tmp_path / "r.json"), "--server-hardware", "none"]
    code = main(["--data", str(data), "--concurrency", "4", "--limit", "20", *shots, *endpoints, *report_to])
    assert code == 0
    report = json.loads((tmp_path / "r.json").read_text())
    found = report["figures"]
    assert (found["resident.right"], found["paged.right"]) == (18, 17)
    assert (found["resident.accuracy"], found["resident.tokens"], found["resident.failed"]) == (0.9, 140, 0)
    assert (found["resident.low_95"], found["resident.high_95"]) == wilson_interval(18, 20)
    (note,) = report["notes"]
    assert note.startswith("paged - resident: -5.00 points")
    assert "3 of 20 questions judged differently, 3 answered in other words: no difference is shown" in note
    assert 2 <= resident.most_at_once <= 4
    body = resident.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.0, 512)
    assert [turn["role"] for turn in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert "paged - resident" in capsys.readouterr().out


def test_an_endpoint_that_differs_by_more_than_chance_fails(
    serve: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resident, paged = serve(), serve(wrong=frozenset(range(500, 507)))
    endpoints = ["--endpoint", f"resident={resident.url}", "--endpoint", f"paged={paged.url}"]
    assert main(["--data", str(data), *endpoints]) == 1
    assert "paged - resident: -35.00 points" in (said := capsys.readouterr().out)
    assert "they differ" in said


def test_failed_requests_count_as_wrong_and_are_listed(
    serve: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(broken=frozenset({505}))
    assert (
        main(["--data", str(data), "--json", str(tmp_path / "r.json"), "--endpoint", f"a={server.url}"]) == 1
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["figures"]["right"], report["figures"]["failed"]) == (19, 1)
    assert "BadRequestError" in report["notes"][0]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $18.00", "18"),
        ("first #### 3, no: #### -4", "-4"),
        ("The answer is 2,500.", "2500"),
        ("It costs $3.50 each", "3.5"),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_number_is_found(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_examples_lose_their_calculator_marks(data: Path) -> None:
    first, second, *_ = read_questions(data)
    turns = messages(second, [first])
    assert turns[2] == {"role": "assistant", "content": "It is 1000.\n#### 1,000"}
    assert second.number == 1002


def test_lines_without_a_number_and_bad_options_are_refused(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "?", "answer": "none"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
        read_questions(path)
    with pytest.raises(SystemExit):
        main(["--data", str(data), "--endpoint", "http://x"])
    with pytest.raises(SystemExit):
        main(["--data", str(data), "--endpoint", "a=http://x", "--shots", "3"])
    assert parse_endpoint("a=http://x/v1/,m").url == "http://x/v1"


def test_wilson_intervals_in_numbers() -> None:
    assert wilson_interval(85, 100) == pytest.approx((0.76718, 0.90696), abs=1e-4)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.27753, abs=1e-4))
    assert wilson_interval(10, 10) == (pytest.approx(0.72247, abs=1e-4), 1.0)
    assert wilson_interval(0, 24)[0] == 0.0
    with pytest.raises(ValueError, match="3 of 2"):
        wilson_interval(3, 2)


def test_a_paired_difference_ignores_what_both_answer_alike() -> None:
    same = [True] * 90
    mean, low, high = paired_difference(
        [*same, *[True] * 8, *[False] * 2], [*same, *[False] * 8, *[True] * 2]
    )
    assert mean == pytest.approx(-0.06)
    # Singles: 8 x -1, 2 x +1, 90 x 0: variance (10 - 100 * 0.0036) / 99.
    spread = 1.95996 * ((10 - 0.36) / 99 / 100) ** 0.5
    assert (low, high) == pytest.approx((-0.06 - spread, -0.06 + spread), abs=1e-5)
    assert paired_difference(same, same) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="equal length"):
        paired_difference([True, True], [True])
