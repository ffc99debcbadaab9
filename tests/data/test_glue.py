"""GLUE's files, tokenised sentences, pairs of glosses."""

import re
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch

from tests.data.glue_files import write_glue
from wellcond.data.glue import GLUE, from_datasets, glue_folder, glue_hub
from wellcond.data.sentences import Example, Sentences
from wellcond.data.wordnet import WORDNET_FOLDER, gloss_pairs, parse, read_wordnet
from wellcond.data.wordpiece import train_wordpiece

WORDNET = pytest.mark.skipif(
    not (WORDNET_FOLDER / "data.noun").is_file(), reason="the Debian package wordnet-base is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


def test_the_tasks_come_in_the_papers_order() -> None:
    assert [task.title for task in GLUE.values()] == [
        "MNLI", "SST-2", "RTE", "QNLI", "QQP", "MRPC", "CoLA", "STS-B",
    ]  # fmt: skip
    assert GLUE["cola"].metrics[0] == "matthews"
    assert set(GLUE["mrpc"].metrics) == set(GLUE["qqp"].metrics) == {"f1", "accuracy"}
    assert set(GLUE["stsb"].metrics) == {"pearson", "spearman"}
    assert all(task.metrics == ("accuracy",) for name, task in GLUE.items() if name in "mnli sst2 rte qnli")


@pytest.mark.parametrize("name", GLUE)
def test_each_task_is_read_from_the_official_files(name: str, folder: Path) -> None:
    task = GLUE[name]
    data = glue_folder(task, folder)
    assert len(data.train) == 60
    expected = {"validation_matched", "validation_mismatched"} if name == "mnli" else {"validation"}
    assert set(data.validation) == expected
    assert all(len(part) == 24 for part in data.validation.values())
    pair = len(task.sentences) == 2
    for example in data.train:
        assert (example.second is not None) == pair
        assert re.fullmatch(r"the \w+ is \w+ and \w+", example.first)
        assert not pair or re.fullmatch(r'they say "the \w+" was \w+', example.second or "")
    labels = {example.label for example in data.train}
    assert labels == ({0.0, 5.0} if task.regression else set(range(len(task.classes))))
    assert glue_folder(task, folder / task.title) == data


def test_matched_and_mismatched_are_two_sets(folder: Path) -> None:
    validation = glue_folder(GLUE["mnli"], folder).validation
    assert validation["validation_matched"] != validation["validation_mismatched"]


@pytest.mark.parametrize("name", GLUE)
def test_the_hub_gives_the_same_examples(name: str, folder: Path) -> None:
    """A DatasetDict with the hub's columns, made from the same sentences."""
    task = GLUE[name]
    data = glue_folder(task, folder)

    def on_hub(examples: list[Example]) -> datasets.Dataset:
        columns = {task.sentences[0]: [e.first for e in examples], "label": [e.label for e in examples]}
        if len(task.sentences) > 1:
            columns[task.sentences[1]] = [e.second for e in examples]
        return datasets.Dataset.from_dict(columns)

    parts = {"train": on_hub(list(data.train))} | {
        part: on_hub(list(examples)) for part, examples in data.validation.items()
    }
    assert from_datasets(task, datasets.DatasetDict(parts)) == data


def test_the_classes_have_the_hubs_numbers() -> None:
    """As nyu-mll/glue lists them; a model fine-tuned there would otherwise be scored wrongly."""
    assert GLUE["mnli"].classes == ("entailment", "neutral", "contradiction")
    assert GLUE["rte"].classes == GLUE["qnli"].classes == ("entailment", "not_entailment")
    assert GLUE["cola"].classes == ("unacceptable", "acceptable")


def test_without_a_network_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: (_ for _ in ()).throw(ConnectionError("no")))
    with pytest.raises(ConnectionError, match=r"GLUE's CoLA .*--data-dir"):
        glue_hub(GLUE["cola"])


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"RTE/train.tsv and RTE/dev.tsv of gluebenchmark.com"):
        glue_folder(GLUE["rte"], tmp_path)
    write_glue(tmp_path, ("rte",))
    file = tmp_path / "RTE" / "train.tsv"
    file.write_text(file.read_text().replace("sentence2", "other", 1))
    with pytest.raises(ValueError, match=r"train.tsv has no column sentence2; its first line has \['index'"):
        glue_folder(GLUE["rte"], tmp_path)
    file.write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(ValueError, match="has no example"):
        glue_folder(GLUE["rte"], tmp_path)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("qqp", "1\t2\t3\tcut off?", "line 62: it has only 1 of the 3 columns"),
        ("rte", "1\ta\tb\tmaybe", "line 62: label 'maybe' is none of entailment, not_entailment"),
        ("mnli", "\t".join("x" * 8) + "\ta\tb\t-\t-", "line 62: label '-' is none of"),
        ("stsb", "\t".join("x" * 7) + "\ta\tb\t5.5", "line 62: score '5.5' is outside 0 to 5"),
        ("stsb", "\t".join("x" * 7) + "\ta\tb\tgood", "line 62: could not convert"),
        ("cola", "gj04\t1", "line 61: it has only 1 of the 2 columns"),
    ],
)
@pytest.mark.filterwarnings("ignore:1 lines left out")
def test_broken_lines_are_fatal_or_counted(name: str, line: str, message: str, tmp_path: Path) -> None:
    task = GLUE[name]
    write_glue(tmp_path, (name,))
    train = tmp_path / task.title / "train.tsv"
    train.write_bytes(train.read_bytes() + line.encode() + b"\n")
    with pytest.raises(ValueError, match=message):
        glue_folder(task, tmp_path)
    with pytest.warns(UserWarning, match=f"1 lines left out, the first: .*{message}"):
        assert len(glue_folder(task, tmp_path, corrupt="skip").train) == 60
    dev = tmp_path / task.title / next(iter(task.parts.values()))
    dev.write_bytes(train.read_bytes())
    with pytest.raises(ValueError, match="line 6"):
        glue_folder(task, tmp_path, corrupt="skip")


def test_quotes_and_odd_line_breaks_inside_sentences_mean_nothing(tmp_path: Path) -> None:
    write_glue(tmp_path, ("rte",))
    odd = 'an "open quote\u2028and\x0ba\x85break'
    file = tmp_path / "RTE" / "train.tsv"
    file.write_bytes(f"index\tsentence1\tsentence2\tlabel\r\n0\t{odd}\tb\tentailment\r\n".encode())
    assert glue_folder(GLUE["rte"], tmp_path).train == [Example(odd, "b", 0)]


# ------------------------------------------------------------------------------------------ sentences


def tokenizer(length: int = 16):
    return train_wordpiece(["the cat sat on the warm mat", "the hat is here"], 40, length=length)


def test_items_are_tokens_labels_and_parts() -> None:
    examples = [Example("the cat", "the hat", 1), Example("the warm mat sat", "here", 0)]
    data = Sentences(examples, tokenizer(), length=16, parts=[0, 1])
    assert len(data) == 2
    assert tokenizer().decode(data[1]["input_ids"]) == "[CLS] the warm mat sat [SEP] here [SEP]"
    assert [int(item["labels"]) for item in data] == [1, 0]
    assert [int(item["part"]) for item in data] == [0, 1]
    assert data[0]["labels"].dtype == torch.int64
    assert set(data[0]) == {"input_ids", "labels", "part"}
    single = Sentences([Example("the cat", None, 2.5)], tokenizer(), length=16, regression=True)
    assert tokenizer().decode(single[0]["input_ids"]) == "[CLS] the cat [SEP]"
    assert single[0]["labels"].item() == 2.5
    with pytest.raises(IndexError):
        data[2]


def test_token_types_go_along_where_the_tokenizer_has_them() -> None:
    typed = tokenizer()
    typed.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    item = Sentences([Example("the cat", "the hat", 1)], typed, length=16)[0]
    assert item["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_long_examples_are_cut_and_counted() -> None:
    long = " ".join(["the"] * 30)
    data = Sentences([Example(long, "the cat", 0), Example("the", "the", 0)], tokenizer(), length=10)
    assert data.truncated == 1
    assert len(data[0]["input_ids"]) == 10
    assert tokenizer().decode(data[0]["input_ids"]).endswith("[SEP] the cat [SEP]")


def test_bad_examples_are_errors() -> None:
    with pytest.raises(ValueError, match="no example"):
        Sentences([], tokenizer(), length=8)
    with pytest.raises(ValueError, match="some examples have one sentence"):
        Sentences([Example("a", None, 0), Example("a", "b", 0)], tokenizer(), length=8)


# ------------------------------------------------------------------------------------------- WordNet


def test_a_line_of_wordnet() -> None:
    line = (
        "00024720 03 n 02 state 0 country_house 1 003 @ 00002137 n 0000 ~ 00024900 n 0000 @ 00000009 v 0000 | "
        'how something is; a way; "the current state"; "his state"  '
    )
    found = parse(line, "noun")
    assert found.words == ("state", "country house")
    assert found.gloss == "how something is; a way"
    assert found.hypernyms == ("noun 00002137",)


def write_wordnet(folder: Path) -> Path:
    """Forty meanings, each a kind of one of four."""
    lines = ["  1 This is the licence  "]
    for i in range(4):
        lines.append(f"{i:08d} 03 n 01 root{i} 0 000 | the root number {i}")
    for i in range(4, 44):
        lines.append(f'{i:08d} 03 n 01 leaf{i} 0 001 @ {i % 4:08d} n 0000 | a leaf with mark {i}; "so"')
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    (folder / "data.verb").write_text("  1 licence\n")
    return folder


def test_pairs_are_balanced_and_neither_gloss_tells_the_label(tmp_path: Path) -> None:
    train, validation = gloss_pairs(write_wordnet(tmp_path), train=24, validation=12)
    for pairs in (train, validation):
        assert sum(pair.label for pair in pairs) == len(pairs) / 2
        by_label = [Counter(pair.second for pair in pairs if pair.label == label) for label in (0, 1)]
        assert by_label[0] == by_label[1]
        for pair in pairs:
            mark = int(pair.first.rpartition(" ")[2])
            root = int((pair.second or "").rpartition(" ")[2])
            assert (mark % 4 == root) == pair.label
    firsts = [pair.first for pair in (*train, *validation)]
    assert len(set(firsts)) == len(firsts) == 36
    assert gloss_pairs(tmp_path, train=24, validation=12) == (train, validation)
    assert gloss_pairs(tmp_path, train=24, validation=12, seed=1)[0] != train


def test_bad_wordnets_and_numbers_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.noun. Install the Debian package wordnet-base"):
        read_wordnet(tmp_path)
    write_wordnet(tmp_path)
    with pytest.raises(ValueError, match="even number from 4, got 7"):
        gloss_pairs(tmp_path, train=7, validation=4)
    with pytest.raises(ValueError, match="40 meanings with a hypernym, fewer than 40 \\+ 4"):
        gloss_pairs(tmp_path, train=40, validation=4)
    (tmp_path / "data.verb").write_text("00000001 29 v 01 go 0 000\n")
    with pytest.raises(ValueError, match=r"data.verb, line 1 is no synset: there is no gloss"):
        read_wordnet(tmp_path)


@WORDNET
def test_the_real_wordnet() -> None:
    """Version 3.0 has 82,115 noun and 13,767 verb synsets (its own wnstats(7WN)); Debian's may have a few more."""
    synsets = read_wordnet()
    counts = Counter(key.split()[0] for key in synsets)
    assert abs(counts["noun"] - 82_115) < 100
    assert abs(counts["verb"] - 13_767) < 100
    (dog,) = [s for s in synsets.values() if s.words[:2] == ("dog", "domestic dog")]
    assert "canine" in {word for key in dog.hypernyms for word in synsets[key].words}
    assert all('"' not in synset.gloss[:1] for synset in list(synsets.values())[:1000])
    train, validation = gloss_pairs(train=400, validation=100)
    assert (len(train), len(validation)) == (400, 100)
