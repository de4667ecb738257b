"""Documents that share 13 words in a row with an evaluation are found, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import ConfigError, SourceConfig
from pipeline.data import sources
from pipeline.data.decontaminate import NUM_WORDS, Evaluations, load_evaluations, words_of
from tests.data.corpora import configuration, write_texts

WORDS = st.lists(st.sampled_from("abc"), max_size=40)


def naive(text: str, exam: str) -> bool:
    def runs(string: str) -> set[tuple[str, ...]]:
        words = words_of(string)
        return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}

    return bool(runs(text) & runs(exam))


@settings(max_examples=300, deadline=None)
@given(text=WORDS, exam=WORDS, shared=WORDS)
def test_the_overlap_is_that_of_the_definition(
    text: list[str], exam: list[str], shared: list[str]
) -> None:
    document, question = " ".join([*text, *shared, "d"]), " ".join([*exam, *shared])
    found = Evaluations(iter([question])).overlap(document)
    assert (found is not None) == naive(document, question)
    assert found is None or len(found.split()) == NUM_WORDS


def test_case_punctuation_and_white_space_do_not_hide_an_overlap() -> None:
    words = [f"w{i}" for i in range(13)]
    evaluations = Evaluations(iter([" ".join(words)]))
    hidden = "It said:\n" + ",\n".join(word.upper() + "!" for word in words)
    assert evaluations.overlap(hidden) == " ".join(words)
    assert evaluations.overlap(" ".join([*words[:6], "and", *words[6:]])) is None


def test_strings_are_found_at_any_depth_and_are_not_joined() -> None:
    words = [f"w{i}" for i in range(26)]
    record = {"a": [" ".join(words[:13])], "b": {"c": " ".join(words[13:20])}, "n": 5, "e": None}
    lines = json.dumps(record).encode() + b"\n" + json.dumps(record).encode()
    for raw in (json.dumps([record]).encode(), lines):
        evaluations = load_evaluations((("memory://exam", raw),))
        assert evaluations.overlap("x " + " ".join(words[:13])) is not None
        assert evaluations.overlap(" ".join(words[7:20])) is None


def test_a_file_that_is_no_json_is_named() -> None:
    with pytest.raises(ConfigError, match=r"decontaminate: memory://exam is neither JSON nor"):
        load_evaluations((("memory://exam", b"no json"),))


def test_a_place_without_evaluations_is_told_before_any_work(tmp_path: Path) -> None:
    config = configuration(
        {"a": SourceConfig(builtin="python")}, decontaminate=(str(tmp_path / "none.json"),)
    )
    with pytest.raises(ConfigError, match=r"data\.decontaminate: no file at .*none\.json"):
        sources.evaluation_files(config)


def test_documents_with_questions_of_the_public_evaluations_are_left_out(
    shared: Path, tmp_path: Path
) -> None:
    lines = (shared / "evals" / "gsm8k.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    question = max((v for v in record.values() if isinstance(v, str)), key=len)
    texts = [f"I read: {question.upper()}", "Nothing of the kind.", " ".join(question.split()[:12])]
    source = SourceConfig(uris=(str(write_texts(tmp_path, texts)),))
    config = configuration({"a": source}, decontaminate=(str(shared / "evals"),))
    evaluations = sources.read_evaluations(config)
    items = [
        item for task in sources.read_tasks(config) for item in sources.read_task(task, evaluations)
    ]
    assert [item.status for _, item in items] == ["contaminated", "document", "document"]
