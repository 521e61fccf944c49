from __future__ import annotations

import importlib
import json
import pathlib

import numpy as np
import pytest

from tfdp.errors import DataError
from tfdp.ledger import read_ledger

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
        yield importlib.import_module("mind_the_privacy_unit")


@pytest.fixture(scope="module")
def files(shared):
    data = shared / "data"
    return data / "enron" / "enron_inbox_subset.tar.gz", data / "models" / "stories260K"


def test_every_cell_has_its_seeds(example):
    runs = example.all_runs(example.EPSILONS, example.KS, example.SEEDS)
    assert len(set(runs)) == len({run.name for run in runs}) == 54 + 3 + 1
    cells = {(run.method, run.epsilon, run.k) for run in runs if run.k is not None}
    assert len(cells) == 2 * 3 * 3


def test_a_slice_is_trained_measured_and_not_trained_again(example, files, tmp_path):
    private = [example.Run(method, 8.0, 2) for method in example.SELECTION]
    runs = [example.Run(example.PUBLIC), example.Run(example.NON_PRIVATE), *private]
    assert "to come" in example.run_all(*files, tmp_path, runs[:3], 120)
    # As a run that was killed leaves it: its steps are spent, and it begins anew under another ledger.
    name = f"{private[1].name}-0.jsonl"
    (tmp_path / "ledgers" / name).write_text("killed\n")
    first = (tmp_path / "results.jsonl").read_text()
    table = example.run_all(*files, tmp_path, runs, 120)

    content = (tmp_path / "results.jsonl").read_text()
    assert content.startswith(first)
    results = [json.loads(line) for line in content.splitlines()]
    assert [example.Run(*(each[name] for name in ("method", "epsilon", "k", "seed"))) for each in results] == runs
    public, *trained = [each["perplexity"] for each in results]
    assert all(each < public for each in trained)
    for each in results[2:]:
        assert 7.5 < each["spent"] <= 8.0
    ledgers = sorted(path.name for path in (tmp_path / "ledgers").glob("*.jsonl"))
    assert ledgers == [f"{private[0].name}-0.jsonl", name, f"{private[1].name}-1.jsonl"]
    assert (tmp_path / "ledgers" / name).read_text() == "killed\n"
    assert read_ledger(tmp_path / "ledgers" / ledgers[0]).steps == 2

    assert f"| 8 | 2 | {trained[1]:.2f} |" in table
    assert f"public: {public:.2f}" in table
    assert (tmp_path / "table.md").read_text() == table
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "perplexity.svg").read_text()

    with pytest.raises(DataError, match="of the same settings"):
        example.run_all(*files, tmp_path, runs, 119)


def test_what_a_sender_gives_depends_on_her_mails_alone(example, files):
    tokenizer = example.stories260k.Tokenizer.from_file(files[1] / "tok512.bin")
    whole, part = (example.read_mails(files[0], tokenizer, limit) for limit in (400, 200))
    # The first mails are the same whatever comes after them, and so is the side that a sender is on.
    assert part.senders == whole.senders[: len(part.senders)]
    assert all(map(np.array_equal, part.tokens, whole.tokens))
    assert max(map(len, whole.held_out)) <= example.EVALUATED + 1 < max(map(len, whole.tokens))


def test_the_table_tells_mean_and_spread(example):
    cells = {("group_privacy", 1.0, 2): (10.0, 12.0), ("user_wise_dp_sgd", 1.0, 2): (8.0, 8.0)}
    results = [
        {"method": method, "epsilon": epsilon, "k": k, "seed": seed, "perplexity": value, "sigma": 0.5}
        for (method, epsilon, k), values in cells.items()
        for seed, value in enumerate(values)
    ]
    results += [
        {"method": name, "epsilon": None, "k": None, "seed": 0, "perplexity": value}
        for name, value in (("public", 90.0), ("non_private", 7.0))
    ]
    assert example.table(results).splitlines()[2:] == [
        "| 1 | 2 | 11.00 ± 1.41 | 0.5 | 8.00 ± 0.00 | 0.5 |",
        "",
        "References: public: 90.00, non-private: 7.00.",
    ]
