"""labkit bench dspark from end to end: its tables hold what must hold; nothing is timed."""

import argparse
import importlib.util
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import labkit
from labkit import paths
from labkit.cli import app

runner = CliRunner()


def bench(*words):
    return runner.invoke(app, ["bench", "dspark", *words])


@pytest.fixture(scope="module")
def output():
    threads = torch.get_num_threads()
    result = bench("--quick")
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("bench_dspark", paths.benchmarks()["dspark"])
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_dspark"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def table(output, heading):
    """The lines below a heading, up to the next blank line, without its sizes."""
    return output.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]


def test_greedy_texts_are_the_same_in_every_domain_and_policy(output):
    rows = [line for line in table(output, "Speculation against plain")[1:] if "/1" in line]
    assert len(rows) == 9 and all(line.endswith("1/1") for line in rows)
    assert {line.split()[0] for line in rows} == {"prose", "code", "counting"}
    for line in rows:
        name, rest = line[12:28].strip(), line[28:].split()
        step, plain, spec, ratio = float(rest[0]), *(float(x) for x in rest[-5:-2])
        assert 1 <= step <= (3 if name == "fixed 2" else 6)
        assert rest[-2:] == ["1/1", "1/1"]
        assert ratio == pytest.approx(spec / plain, abs=0.02)


def test_costs_add_up_and_break_even_follows(output):
    lines = table(output, "What a step costs")[1:]
    cost = {line[2:30].strip(): [float(x) for x in line[30:].split()] for line in lines[:4]}
    plain, draft, check, both = cost.values()
    assert both[0] == pytest.approx(draft[0] + check[0], abs=0.02) and plain[1] == 1.0
    assert both[1] == pytest.approx(both[0] / plain[0], abs=0.02)
    assert float(re.search(r"break-even: ([\d.]+)", lines[4])[1]) == pytest.approx(both[1])


def test_confidence_tables_count_every_slot(output):
    for name in ("sampled, temperature 1", "greedy"):
        lines = table(output, f"believed and seen ({name})")[1:]
        assert [line.split()[0] for line in lines[:5]] == ["1", "2", "3", "4", "5"]
        seen = [float(line.split()[1]) for line in lines[:5]]
        assert seen == sorted(seen, reverse=True)
        head = output.partition(f"seen ({name})")[2].splitlines()[1]
        proposals = int(re.search(r"(\d+) proposals", head)[1])
        assert sum(int(line[16:26]) for line in lines[7:]) == 5 * proposals


def test_every_load_has_every_policy_and_the_measured_rates(output):
    loads = re.findall(r"  R = (\d+): SPS without drafts ([\d.]+); with drafts, by B  (.*)", output)
    assert [int(R) for R, *_ in loads] == [1, 4]
    for R, _, points in loads:
        tokens = [int(p.split(":")[0]) for p in points.split("  ")]
        assert tokens[0] == int(R) and tokens[-1] == 6 * int(R)
        lines = output.partition(f"  R = {R}: ")[2].partition("\n\n")[0].splitlines()[2:]
        found = {line[2:20].strip(): line[20:].split() for line in lines}
        assert set(found) == {"none", "fixed 5", "survival > 0.5", "scheduler", "delayed budget"}
        for name, row in found.items():
            width, step = float(row[0]), float(row[1])
            assert int(R) <= width <= 6 * int(R) and 1 <= step <= 6
            if name == "none":
                assert width == int(R) and step == 1 and row[2] == "-" and row[4] == "1.00"


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--slots", "0"], 2, "--slots is 0"), (["--requests", "4", "0"], 2, "--requests is 0"),
    (["--length", "2000"], 2, "the context of mini is 2048"),
    (["--new-tokens", "1"], 2, "--new-tokens is 1: give at least 2"),
    (["--length", "1952"], 2, "6 for requests of different age make 2054 tokens"),
    (["--length", "2044", "--new-tokens", "2", "--only", "costs"], 2,
     "--length and --slots make 2049"),
    (["--only", "speed"], 2, "invalid choice"), (["--slots", "17"], 1, "from 0 (no draft) to 16"),
    (["--temperature", "-1", "--quick", "--only", "pairs"], 1, "temperature is -1"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, code, said):
    result = bench(*words)
    assert result.exit_code == code and said in result.output, result.output
    assert "Traceback" not in result.output


def test_the_shortest_texts_are_measured_too():
    words = ["--new-tokens", "2", "--prompts", "2", "--length", "16", "--repeats", "1"]
    result = bench("--only", "pairs", *words, "--slots", "7")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("drafted 7 slots, trained for 5") == 1
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("/2")]
    # One step each, which has no room for a draft.
    assert rows and all(row[-2:] == ["2/2", "2/2"] and "1.00" in row for row in rows)
    result = bench("--only", "load", *words, "--requests", "1")
    assert result.exit_code == 0 and "delayed budget" in result.stdout, result.output


def test_a_text_that_ends_at_its_first_token_is_not_counted(module, monkeypatch):
    lab = labkit.load("mini")
    options = argparse.Namespace(new_tokens=4, temperature=0, top_p=1.0, slots=2)
    ended, found = lab.generate([0, 5], 1, temperature=0), module.Paired()
    write = lab.generate
    monkeypatch.setattr(lab, "generate", lambda *words, **rest: (
        write(*words, **rest) if rest.get("speculative") else ended))
    module.pair(lab, options, [0, 5], 1, module.Fixed(2), found)
    assert (found.used, found.tokens, found.same) == (0, 0, 0)


def test_each_of_a_pair_comes_first_in_turn(module, monkeypatch):
    lab, order = labkit.load("mini"), []
    options = argparse.Namespace(new_tokens=4, temperature=0, top_p=1.0, slots=2)
    write = lab.generate

    def watched(*words, **rest):
        order.append("spec" if rest.get("speculative") else "plain")
        return write(*words, **rest)

    monkeypatch.setattr(lab, "generate", watched)
    found = module.Paired(per_slot=[[0, 0], [0, 0]])
    for number in range(2):
        module.pair(lab, options, [0, 5, 6], number, module.Fixed(2), found)
    assert order == ["plain", "spec", "spec", "plain"] and found.used == found.same == 2


def test_the_help_has_examples():
    result = bench("--help")
    assert result.exit_code == 0 and "examples:" in result.stdout and "--requests" in result.stdout


def test_even_acceptance_solves_its_equation(module):
    for slots in (1, 5, 16):
        for tokens in (1.0, 1.3, 1 + slots / 2, 1 + slots):
            p = module.even_acceptance(tokens, slots)
            assert sum(p**k for k in range(slots + 1)) == pytest.approx(tokens, abs=1e-9)
