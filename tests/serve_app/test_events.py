"""Server-sent events: one line each whatever the text, and those from a template like all others."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.http.streaming import EventTemplate, encode_event

TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from('"\\\n\r\t\u2028\u2029\u0085{}:漢')))


def chunk(model: str, text: str) -> dict[str, object]:
    return {"model": model, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]}


@settings(max_examples=200, deadline=None)
@given(model=TEXTS, text=TEXTS)
@example(model='m", "text":""', text='"text":""')
@example(model='"text":""', text="\u2028\u2029\u0085")
@example(model='\\"text":""', text="")
def test_a_template_makes_the_event_that_encoding_it_would(model: str, text: str) -> None:
    event = EventTemplate(chunk(model, ""), "text").fill(text)
    assert event == encode_event(chunk(model, text))
    assert json.loads(event.removeprefix("data: ")) == chunk(model, text)
    assert event.splitlines()[1:] == [""]


def test_a_template_needs_its_field() -> None:
    with pytest.raises(ValueError, match="content"):
        EventTemplate(chunk("m", ""), "content")
