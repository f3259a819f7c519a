"""Bytes to events: however they are cut, whatever stands between the lines."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.diagnose.wire import MAX_EVENT_BYTES, EventReader, Read, WireError

TEXTS = [
    "Hello",
    " wörld",
    "日本語",
    "\u2028line\u2029",
    "\x85",
    "🙂🙂",
    "a\\nb",
    ": not a comment",
    "data: not a field",
]


def events(pieces: list[bytes]) -> list[str]:
    reader = EventReader()
    found = [e for at, piece in enumerate(pieces) for e in reader.push(Read(at / 10, piece))]
    return [e.data for e in found + reader.flush()]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from(["", " "]),
    ping=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_cut_gives_the_same_events(texts, end, space, ping, cuts):
    sent = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    wire = "".join((f": ping{end}{end}" if ping else "") + f"data:{space}{data}{end}{end}" for data in sent).encode()
    borders = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    pieces = [wire[a:b] for a, b in pairwise(borders)]
    assert events(pieces) == sent


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (b"data: 1\n\ndata: 2", ["1", "2"]),  # the stream ends without a blank line
        (b"data: a\ndata: b\n\n", ["a\nb"]),  # one event of two lines
        (b'data: {"a":1}\ndata: {"a":2}\ndata: [DONE]\n', ['{"a":1}', '{"a":2}', "[DONE]"]),  # pasted, blanks lost
        (b"event: message\nid: 7\nretry: 10\ndata: x \n\n", ["x "]),
        (b"\xef\xbb\xbfdata: bom\n\n", ["bom"]),
        (b"\n\n\n: only pings\n\n", []),
        (b'{"choices": []}\n{"choices": [1]}\n', ['{"choices": []}', '{"choices": [1]}']),  # lines of JSON
        (b"data\n\n", [""]),
    ],
)
def test_what_the_specification_says_and_what_servers_do(wire, expected):
    assert events([wire]) == expected
    assert events([bytes([byte]) for byte in wire]) == expected


def test_an_event_has_the_time_of_its_last_byte():
    reader = EventReader()
    found = reader.push(Read(1.0, b"data: ab"))
    found += reader.push(Read(2.0, b"c\n"))
    found += reader.push(Read(3.0, b"\ndata: d\n\n"))
    assert [(e.at_s, e.data, e.read_idx) for e in found] == [(2.0, "abc", 1), (3.0, "d", 2)]


def test_an_error_line_and_pings_are_seen():
    reader = EventReader()
    found = reader.push(Read(0.0, b': hi\n\nerror: {"message": "slot unavailable"}\n\n'))
    assert (found[0].name, reader.n_pings) == ("error", 1)


def test_a_line_without_end():
    reader = EventReader()
    reader.push(Read(0.0, b"x" * MAX_EVENT_BYTES))
    with pytest.raises(WireError, match="without the end of a line"):
        reader.push(Read(0.1, b"x"))
