"""ListOps: the grammar, the answers by another evaluator, and files that do not depend on how they were made."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.data.lra import generating
from wellcond.data.lra.__main__ import main
from wellcond.data.lra.listops import CLOSE, OPERATORS, TOKENS, Grammar, encode, evaluate, sample, tokenize
from wellcond.data.lra.listops_files import (
    Counts,
    expression,
    expressions,
    listops,
    read_listops,
    write_listops,
)
from wellcond.data.lra.verifying import by_python, nesting, verify_listops

SHORT = Grammar(max_depth=3, max_arguments=4, min_length=4, max_length=30)
FEW = Counts(train=25, val=4, test=6)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "PART_SIZE", 10)


trees = st.recursive(
    st.integers(0, 9),
    lambda below: st.tuples(st.sampled_from(sorted(OPERATORS)), st.lists(below, min_size=1, max_size=4)),
    max_leaves=30,
)


def tokens_of(tree: Any) -> list[str]:
    if isinstance(tree, int):
        return [str(tree)]
    name, arguments = tree
    return [name, *(token for one in arguments for token in tokens_of(one)), CLOSE]


@given(trees)
def test_the_stack_and_python_agree_on_any_expression(tree: Any) -> None:
    tokens = tokens_of(tree)
    assert evaluate(tokens) == by_python(" ".join(tokens))


@given(trees, st.data())
def test_what_is_no_expression_is_refused(tree: Any, data: st.DataObject) -> None:
    """One token left out, doubled or added can leave an expression, but then a longer or shorter one."""
    tokens = tokens_of(tree)
    i = data.draw(st.integers(0, len(tokens) - 1))
    if tokens[i] in OPERATORS or tokens[i] == CLOSE:
        with pytest.raises(ValueError, match=r"token \d+|still open"):
            evaluate(tokens[:i] + tokens[i + 1 :])
    with pytest.raises(ValueError, match=r"follow|still open"):
        evaluate([*tokens, "3"])
    with pytest.raises(ValueError, match="is no token of ListOps"):
        evaluate([*tokens[:i], "FIRST", *tokens[i:]])


def test_brackets_are_tokens() -> None:
    """Without them both would read MAX 1 MIN 2 9 3."""
    one, other = tokenize("[MAX 1 [MIN 2 9 ] 3 ]"), tokenize("[MAX 1 [MIN 2 9 3 ] ]")
    assert (evaluate(one), evaluate(other)) == (3, 2)
    assert len(encode(one)) == len(encode(other)) == 8
    assert encode(one).tolist() != encode(other).tolist()
    assert sorted(set(encode(TOKENS[1:]))) == list(range(1, 16))  # 0 is padding


def test_official_brackets_of_pairs_change_nothing() -> None:
    assert tokenize("( ( ( ( [MED 8 ) 3 ) ( ( ( [SM 9 ) 4 ) ] ) ) ] )") == tokenize("[MED 8 3 [SM 9 4 ] ]")


def test_samples_of_the_published_grammar() -> None:
    grammar = Grammar()
    found = [expression(grammar, 0, index) for index in range(150)]
    for tokens in found:
        assert 500 < len(tokens) < 2000
        assert nesting(tokens) <= 10
        assert evaluate(tokens) == by_python(" ".join(tokens))
    assert max(nesting(tokens) for tokens in found) == 10
    counts = Counter(token for tokens in found for token in tokens)
    operators = sum(counts[name] for name in OPERATORS)
    assert counts[CLOSE] == operators
    assert {name: round(counts[name] / operators, 1) for name in OPERATORS} == pytest.approx(
        dict.fromkeys(OPERATORS, 0.25), abs=0.06
    )
    digits = sum(counts[str(digit)] for digit in range(10))
    assert all(counts[str(digit)] / digits == pytest.approx(0.1, abs=0.01) for digit in range(10))


def test_numbers_of_arguments_are_uniform_from_two() -> None:
    """Of flat expressions that are not rejected for their length."""
    grammar = Grammar(max_depth=2, max_arguments=5, min_length=1, max_length=100)
    rng = random.Random(0)
    lengths = Counter(len(sample(grammar, rng)) - 2 for _ in range(2000))
    assert sorted(lengths) == [2, 3, 4, 5]
    assert all(count == pytest.approx(500, abs=100) for count in lengths.values())


@pytest.mark.parametrize(
    "impossible",
    [
        {"max_arguments": 1},
        {"min_length": 10, "max_length": 11},
        {"max_depth": 2, "max_arguments": 5, "min_length": 20},
    ],
)
def test_grammars_that_give_nothing_are_refused(impossible: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"nothing to sample|are too many"):
        Grammar(**impossible)


def test_too_few_expressions_are_noticed() -> None:
    tiny = Grammar(
        max_depth=2, max_arguments=2, min_length=3, max_length=5
    )  # 4 operators, 100 pairs of digits
    assert len({" ".join(tokens) for tokens in expressions(tiny, 0, 100)}) == 100
    with pytest.raises(ValueError, match="too few expressions"):
        expressions(tiny, 0, 401)


def test_training_and_test_share_no_expression() -> None:
    split = listops(SHORT, train=300, test=100)
    keys = [
        tuple(part[i]["input_ids"].tolist()) for part in (split.train, split.test) for i in range(len(part))
    ]  # type: ignore[arg-type]
    assert len(set(keys)) == 400


# --------------------------------------------------------------------------------------------- files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.usefixtures("small_parts")
def test_files_are_the_same_however_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_listops(tmp_path / "once", grammar=SHORT, counts=FEW)
    expected = contents(tmp_path / "once")
    assert sorted(expected) == ["basic_test.tsv", "basic_train.tsv", "basic_val.tsv", "listops.json"]

    made: list[range] = []
    written = generating._written

    def interrupted(write: Any, part: range, path: Path) -> int:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(part)
        return written(write, part, path)

    monkeypatch.setattr(generating, "_written", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_listops(tmp_path / "twice", grammar=SHORT, counts=FEW)
    monkeypatch.setattr(generating, "_written", lambda *a: made.append(a[1]) or written(*a))
    write_listops(tmp_path / "twice", grammar=SHORT, counts=FEW)
    assert made == [range(10), range(10, 20), range(20, 30), range(30, 35)]  # none of them twice
    assert contents(tmp_path / "twice") == expected


@pytest.mark.usefixtures("small_parts")
@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path: Path) -> None:
    for workers in (1, 2):
        write_listops(tmp_path / str(workers), grammar=SHORT, counts=FEW, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    write_listops(tmp_path, grammar=SHORT, counts=FEW)
    before = contents(tmp_path)
    for change in ({"seed": 1}, {"grammar": Grammar(max_depth=4, min_length=4, max_length=30)}):
        with pytest.raises(ValueError, match="made with other settings"):
            write_listops(tmp_path, **({"grammar": SHORT, "counts": FEW} | change))
    assert contents(tmp_path) == before


def test_other_seeds_give_other_expressions() -> None:
    assert expression(SHORT, 0, 3) == expression(SHORT, 0, 3)
    assert len({" ".join(expression(Grammar(), seed, index)) for seed in (0, 1) for index in (0, 1)}) == 4


def test_reading_what_was_written(tmp_path: Path) -> None:
    write_listops(tmp_path, grammar=SHORT, counts=FEW)
    split = read_listops(tmp_path, length=30)
    assert (len(split.train), len(split.test)) == (25, 6)  # type: ignore[arg-type]
    first = (tmp_path / "basic_train.tsv").read_text().splitlines()[1]
    tokens = first.split("\t")[0].split()
    assert split.train[0]["input_ids"].tolist() == encode(tokens).tolist()
    assert split.train[0]["labels"] == torch.tensor(evaluate(tokens))


def test_broken_files_are_refused_by_line(tmp_path: Path) -> None:
    write_listops(tmp_path, grammar=SHORT, counts=FEW)
    path = tmp_path / "basic_test.tsv"
    good = path.read_text()
    for change, message in (
        (lambda lines: ["Expression\tValue", *lines[1:]], "begins with 'Expression"),
        (lambda lines: [*lines[:2], lines[2].replace("\t", " "), *lines[3:]], "line 3: no expression"),
        (lambda lines: [*lines[:2], "[FIRST 1 2 ]\t1", *lines[3:]], "no tokens of ListOps: .*FIRST"),
        (lambda lines: [*lines[:2], lines[2][:-1] + "10", *lines[3:]], "line 3: no expression"),
    ):
        path.write_text("\n".join(change(good.splitlines())) + "\n")
        with pytest.raises(ValueError, match=message):
            read_listops(tmp_path, length=30)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"basic_test.tsv. Generate it: python -m wellcond.data.lra listops"
    ):
        read_listops(tmp_path, length=30)


def test_an_expression_that_does_not_fit_is_not_cut(tmp_path: Path) -> None:
    write_listops(tmp_path, grammar=SHORT, counts=FEW)
    with pytest.raises(ValueError, match=r"line \d+, has \d+ tokens, and 8 fit"):
        read_listops(tmp_path, length=8)


# ---------------------------------------------------------------------------------- verifier, command


@pytest.mark.parametrize("injected", ["answer", "length", "twice", "missing"])
def test_the_verifier_finds_what_is_wrong(injected: str, tmp_path: Path) -> None:
    write_listops(tmp_path, grammar=SHORT, counts=FEW)
    assert verify_listops(tmp_path).startswith("35 expressions of ListOps are right")
    path = tmp_path / "basic_train.tsv"
    lines = path.read_text().splitlines()
    source, answer = lines[7].split("\t")
    lines[7] = {
        "answer": f"{source}\t{(int(answer) + 1) % 10}",
        "length": "7\t7",
        "twice": lines[3],
        "missing": "",
    }[injected]
    path.write_text("\n".join(line for line in lines if line) + "\n")
    with pytest.raises(ValueError, match=r"the answer is|outside of|there before|expected 25"):
        verify_listops(tmp_path)


def test_the_command_tells_how_far_it_is_in_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ["--train", "20", "--val", "2", "--test", "3", "--workers", "1"]
    assert main(["listops", str(tmp_path / "a"), *counts]) == 0
    out, err = capsys.readouterr()
    assert err == "25 of 25 samples\n"
    assert "\r" not in out + err
    assert main(["verify", str(tmp_path / "a")]) == 0
    assert "25 expressions of ListOps are right" in capsys.readouterr().out
    assert main(["listops", str(tmp_path / "a"), *counts, "--seed", "1"]) == 2
    assert "made with other settings" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2
    assert json.loads((tmp_path / "a" / "listops.json").read_text())["grammar"]["max_length"] == 2000


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_two_workers_are_stopped(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches the workers too, and is one sentence; those of a parent that was killed do not stay behind."""
    command = [sys.executable, "-m", "wellcond.data.lra", "listops", str(tmp_path), "--workers", "2"]
    # A shell without job control may have told us to ignore it, and that would be handed on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    parts = tmp_path / "parts"
    while running.poll() is None and not list(parts.glob("0*-*[0-9]")):
        time.sleep(0.05)
    if how == signal.SIGINT:
        os.killpg(running.pid, how)
    else:
        os.kill(running.pid, how)
    told = running.communicate(timeout=60)[1]  # returns when no process has the pipe open any more
    assert "Traceback" not in told
    if how == signal.SIGINT:
        assert running.returncode == 130
        assert told.rstrip().endswith("wellcond: stopped; the same command goes on from there")
        assert not list(parts.glob("*.writing"))


@pytest.mark.slow
def test_ten_thousand_samples_of_the_published_grammar(tmp_path: Path) -> None:
    write_listops(tmp_path, counts=Counts(8_000, 1_000, 1_000))
    assert verify_listops(tmp_path).startswith("10000 expressions of ListOps are right")
