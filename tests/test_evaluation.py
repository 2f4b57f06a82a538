"""benchmarks/: comparison, verdict, records, tables, report and soak, with made-up numbers, on the CPU."""

import argparse
import html
import importlib
import json
import math
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import (
    accept,
    accuracy,
    backward,
    bits,
    blocks,
    call_cost,
    claims,
    compare,
    evaluate,
    harness,
    lengths,
    nightly,
    publish,
    records,
    report,
    reproducibility,
    soak,
    systems,
    tables,
)
from benchmarks.__main__ import COMMANDS
from benchmarks.shapes import PAPER_SHAPES, Shape, cell_name, counted_pairs, describe, flop, inputs
from dash_flash_attn import demo, ops, reference
from dash_flash_attn.lab import clocks

ROOT = Path(__file__).resolve().parent.parent
SMALL = Shape(64, True, 192, 1, 4, 2)


def row(system, tflops, shape=PAPER_SHAPES[0], matmul=700.0, **more):
    return {
        **describe(shape), "system": system, "tflops": tflops, "ms": flop(shape) / tflops / 1e9,
        "ratio_to_matmul": tflops / matmul, "matmul_tflops": matmul, **more,
    }  # fmt: skip


def environment(date="2026-01-02T03:04:05+00:00", device="a GPU"):
    return {
        "date": date, "device": device, "driver": "1", "cuda": "13.0", "torch": "2.11", "commit": "c" * 40,
        "uncommitted_changes": False,
    }  # fmt: skip


def sweep_record(rows, **more):
    return {"kind": "backward", "form": "quick", "environment": environment(**more), "rows": rows}


def hashes(dq="1", auto="shift", inputs="0"):
    gradients = {"dq": dq, "dk": "2", "dv": "3"}
    return {"inputs": inputs, "auto": auto, "shift": gradients, "naive": dict(gradients, dq="9")}


def other_lengths(speed=500.0):
    return [row(name, speed, shape) for shape in lengths.QUICK for name in ("auto", "unordered")]


def night(rows=None, found=None, soak_failed=(), tests_failed=(), **more):
    return {
        "kind": "nightly",
        "environment": environment(**more),
        "seconds": 100.0,
        "tests": {
            "exit_status": int(bool(tests_failed)), "passed": 5, "failed": len(tests_failed), "skipped": 1,
            "failed_tests": list(tests_failed),
        },
        "backward": sweep_record([row("auto", 400.0), row("shift", 390.0)] if rows is None else rows, **more),
        "lengths": sweep_record(other_lengths(), **more) | {"kind": "lengths"},
        "bits": {"kind": "bits", "environment": environment(), "cases": found or {"case": hashes()}},
        "soak": {
            "kind": "soak", "environment": environment(), "seconds": 60.0, "cases": 50,
            "failed": [{"case": c, "problems": ["dq differs"], "command": f"run {c}"} for c in soak_failed],
        },
    }  # fmt: skip


ACCEPTED = (Path("accepted.json"), night())
ACCEPTED_BITS = ACCEPTED[1]["bits"]


# The harness.


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh", "abcdefghijk"])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_each_round_times_all_in_another_order(names, count):
    def order(seed):
        order = []
        times, errors = harness.interleaved(
            {n: lambda n=n: n for n in names}, lambda run: order.append(run()) or 1, count, seed
        )
        assert times == {n: [1] * count for n in names} and errors == {}
        return "".join(order)

    found = order("cell")
    assert found == order("cell") and len({order(f"cell {i}") for i in range(50)}) > 1
    rounds = [found[i : i + len(names)] for i in range(0, len(found), len(names))]
    assert all(sorted(r) == list(names) for r in rounds)
    even = len(names) + len(names) % 2
    assert len(set(rounds)) == min(count, even)
    for name in names:
        before = [r[r.index(name) - 1] for r in rounds[:even] if r[0] != name]
        # Behind each of the others once at the most; where a place is left out, behind one of them twice.
        assert len(set(before)) >= len(before) - len(names) % 2


def test_a_system_that_fails_leaves_the_rounds():
    calls = []

    def breaks():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("too\nmuch")

    times, errors = harness.interleaved({"good": int, "bad": breaks}, lambda run: run() or 2.0, 4)
    assert times == {"good": [2.0] * 4} and errors == {"bad": "RuntimeError: too"} and len(calls) == 2


def measure(tmp_path, cells, measure_cell):
    options = argparse.Namespace(quick=True, out=tmp_path / "deep" / "record.json")
    record = harness.measure(
        "kind", options, cells, measure_cell,
        describe=lambda cell: {"cell": str(cell)}, show=lambda row: f"shown {row['x']}",
        settings={"rounds": 3},
    )  # fmt: skip
    assert json.loads(options.out.read_text()) == record
    return record


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_prints_its_tables_and_fails_if_a_row_did(tmp_path, monkeypatch, capsys, broken):
    monkeypatch.setattr(harness, "require_kernels", lambda: None)

    def measure_cell(cell):
        if broken and cell == 2:
            raise ValueError("no such cell")
        return [{"cell": str(cell), "x": cell}]

    status = harness.run(
        "kind", argparse.Namespace(quick=True, out=tmp_path / "record.json"), [1, 2], measure_cell,
        lambda rows: [tables.Table(f"{len(rows)} {word}", ["a"], [["b"]]) for word in ("first", "second")],
        describe=lambda cell: {"cell": str(cell)}, show=lambda row: f"shown {row['x']}",
    )  # fmt: skip
    assert status == int(broken)
    text = capsys.readouterr().out
    assert text.index("**2 first**") < text.index("**2 second**")
    assert len(json.loads((tmp_path / "record.json").read_text())["rows"]) == 2


def test_a_failed_cell_is_marked_and_the_next_one_follows(tmp_path, capsys):
    def measure_cell(cell):
        if cell == 2:
            raise ValueError("no such cell")
        return [{"cell": str(cell), "x": cell}]

    record = measure(tmp_path, [1, 2, 3], measure_cell)
    assert record["rows"] == [
        {"cell": "1", "x": 1}, {"cell": "2", "error": "ValueError: no such cell"}, {"cell": "3", "x": 3},
    ]  # fmt: skip
    assert record["form"] == "quick" and record["rounds"] == 3 and record["environment"]["python"]
    text = capsys.readouterr().out
    assert "[1/3] 0:00: 1" in text and "left: 3" in text and "shown 3" in text
    assert "FAILED 2: ValueError: no such cell" in text and "3 rows, 1 failed" in text


def test_what_a_run_measured_before_it_was_cut_off_is_there(tmp_path):
    def measure_cell(cell):
        if cell == 2:
            raise KeyboardInterrupt
        return [{"cell": str(cell), "x": cell}]

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, [1, 2, 3], measure_cell)
    assert json.loads((tmp_path / "deep" / "record.json").read_text())["rows"] == [{"cell": "1", "x": 1}]


def test_after_the_gpu_is_lost_no_cell_is_tried(tmp_path, monkeypatch):
    def lost():
        raise harness.GpuLost("illegal address")

    tried = []

    def measure_cell(cell):
        tried.append(cell)
        raise RuntimeError("launch failed")

    monkeypatch.setattr(harness, "check_gpu", lost)
    rows = measure(tmp_path, [1, 2, 3], measure_cell)["rows"]
    assert tried == [1] and len(rows) == 3 and rows[0]["error"] == "RuntimeError: launch failed"
    assert all("illegal address" in r["error"] for r in rows[1:])


def test_records_are_json_with_a_line_a_row():
    record = {"a": {"b": [1, 2], "c": {}}, "rows": [{"x": [1, {"y": None}]}, {"x": 'quo"te'}], "empty": []}
    text = harness.dumps(record)
    assert json.loads(text) == record
    assert '  {"x": [1, {"y": null}]},\n  {"x": "quo\\"te"}\n' in text


def test_what_is_no_record_is_named(tmp_path):
    for content in ("nothing", "[1]"):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match=r"x\.json is no record"):
            harness.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"benchmarks.{command}").main(["--help"])
    assert stop.value.code == 0 and f"python -m benchmarks {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["backward", "evaluate", "nightly", "soak", "bits"])
def test_without_kernels_a_command_says_why(command, monkeypatch):
    monkeypatch.setattr(harness.info, "unusable", lambda: "no GPU today")
    with pytest.raises(SystemExit, match="benchmarks: no GPU today"):
        importlib.import_module(f"benchmarks.{command}").main([])


def test_the_program_as_users_start_it():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)


def test_all_parts_run_even_if_one_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "require_kernels", lambda: None)
    seen = {}

    def part(name):
        def main(argv):
            seen[name] = argv
            if name == "blocks":
                raise MemoryError("too little")
            return int(name == "memory")

        return main

    for name in evaluate.PARTS:
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "main", part(name))
    arguments = ["--quick", "--peers", "fa3,fa2", "--peers-path", "x.py", "--folder", str(tmp_path)]
    assert evaluate.main(arguments) == 1
    assert list(seen) == list(evaluate.PARTS)
    assert seen["accuracy"] == [*arguments[:5], "--out", str(tmp_path / "accuracy_quick.json")]
    text = capsys.readouterr().out
    assert re.search(r"blocks .*FAILED: MemoryError: too little", text)
    assert re.search(r"memory .*some rows failed", text) and re.search(r"accuracy .*ok", text)
    assert evaluate.main(["--parts", "accuracy,call_cost"]) == 0
    with pytest.raises(SystemExit):
        evaluate.main(["--parts", "nonsense"])


# Systems and what is measured of them.


class Math:
    """A peer in torch's own operations; + is right and - has a dq of zeros."""

    def fwd(self, q, k, v, causal):
        self.tensors = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            heads = [x.transpose(1, 2) for x in self.tensors]
            self.out = F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(
                1, 2
            )
        return self.out.detach(), "anything"

    def bwd(self, dout, q, k, v, out, lse, causal, deterministic):
        assert lse == "anything"
        dq, dk, dv = torch.autograd.grad(self.out, self.tensors, dout, retain_graph=True)
        return (dq if deterministic else dq * 0), dk, dv


def peer_module(tmp_path):
    path = tmp_path / "others.py"
    path.write_text(
        "from test_evaluation import Math\n\n\ndef load(name):\n"
        "    if name == 'broken':\n        raise OSError('no such library')\n    return Math()\n"
    )
    return path


def test_peers_come_from_a_module_and_one_that_fails_says_so_in_its_cells(tmp_path):
    found = systems.peer_systems(["math", "broken", "cudnn"], peer_module(tmp_path))
    assert [s.name for s in found] == ["math+", "math-", "broken+", "broken-", "cudnn-"]
    assert [s.deterministic for s in found] == [True, False, True, False, False]
    with pytest.raises(RuntimeError, match="not loaded: OSError: no such library"):
        found[2].backward([torch.zeros(1, 64, 1, 64)] * 4, True)


def test_a_peer_in_autograd_has_its_own_gradients(tmp_path):
    right, wrong = systems.peer_systems(["math"], peer_module(tmp_path))
    q, k, v = (torch.randn(1, 70, h, 64, requires_grad=True) for h in (4, 2, 2))
    dout = torch.randn(1, 70, 4, 64)
    ours = systems.our_system("auto").attention(q, k, v, True)
    expected = torch.autograd.grad(ours, (q, k, v), dout)
    found = torch.autograd.grad(right.attention(q, k, v, True), (q, k, v), dout)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert not torch.autograd.grad(wrong.attention(q, k, v, True), (q, k, v), dout)[0].any()


def test_unknown_schedules_are_named():
    with pytest.raises(SystemExit, match="'best' is none of naive"):
        systems.chosen(argparse.Namespace(schedules=["best"], peers=[], peers_path=None))


def test_a_cell_of_the_sweep():
    """Median of the rounds, and the ratio of each round to the matmul of that round."""
    names = ["shift", "symmetric_shift", "auto", "unordered"]
    chosen = [*map(systems.our_system, names), *systems.peer_systems(["fa3"], None)]
    # The clock falls, the ratio to the matmul stays.
    first = {harness.MATMUL: 1.0, "shift": 2.0, "symmetric_shift": 3.0, "unordered": 4.0}
    order = clocks.turns(list(first), 3, cell_name(SMALL))
    clock = iter([first[name] * (1 + i // 4) for i, name in enumerate(order)])
    rows = backward.measure_cell(
        SMALL, chosen, 3, clock=lambda run: (run(), next(clock))[1], matmul=lambda: None, device="cpu"
    )
    by_name = {r["system"]: r for r in rows}
    assert list(by_name) == [*names, "fa3+", "fa3-"]
    assert by_name["shift"]["round_ms"] == [2.0, 4.0, 6.0] and by_name["shift"]["ms"] == 4.0
    matmul = [harness.matmul_tflops(t) for t in (1.0, 2.0, 3.0)]
    assert by_name["shift"]["ratio_to_matmul"] == pytest.approx(flop(SMALL) / 2.0 / 1e9 / matmul[0])
    assert by_name["shift"]["matmul_tflops"] == pytest.approx(matmul[1])
    assert by_name["shift"]["tflops"] == pytest.approx(flop(SMALL) / 4.0 / 1e9)
    # "auto" is shift here, and is not timed twice.
    assert by_name["auto"] == {**by_name["shift"], "system": "auto", "measured_as": "shift"}
    assert "--peers-path" in by_name["fa3+"]["error"] and "ms" not in by_name["fa3+"]


def test_cells_can_be_chosen_by_name():
    parser = backward.sweep_parser("small_jobs", "", ("auto",))
    options = parser.parse_args(["--cells", "d1-none"])
    with pytest.raises(SystemExit, match="--cells: d1-none is none of d128-full-n512-b32-h16-kv16"):
        backward.named(options.cells, PAPER_SHAPES)
    names = [cell_name(PAPER_SHAPES[5]), cell_name(PAPER_SHAPES[1])]
    options = parser.parse_args(["--cells", ",".join(names)])
    assert backward.named(options.cells, PAPER_SHAPES) == [PAPER_SHAPES[5], PAPER_SHAPES[1]]
    assert backward.named(None, PAPER_SHAPES) == PAPER_SHAPES


# Lengths.


def test_the_drawn_lengths_are_the_same_each_time():
    """Another list would make records incomparable."""
    assert lengths.DRAWN == (
        511, 607, 656, 725, 843, 947, 1062, 1190, 1308, 1467, 1734, 1866, 2184, 2486, 2818,
        3194, 3304, 3713, 4419, 4873, 5242, 6223, 7152, 7999, 8361, 9483, 10297, 12947, 13321, 15872,
    )  # fmt: skip
    for seed in range(100):
        drawn = lengths.drawn(30, seed)
        assert sorted(set(drawn)) == drawn == lengths.drawn(30, seed) != lengths.drawn(30, seed + 1)
        assert len(drawn) == 30 and drawn[0] >= 500 and drawn[-1] <= 16384
        assert 3 < sum(n % 2 for n in drawn) < 27
        assert sum(n < 2862 for n in drawn) == 15  # the geometric mean of the ends


def test_the_cells_of_the_lengths():
    cells = lengths.FULL
    assert len(cells) == len(set(map(cell_name, cells))) == len(set(map(tables.cell_words, cells)))
    assert set(lengths.QUICK) < set(cells) and len(lengths.QUICK) == 8
    masks = {(d, causal) for d in (64, 128) for causal in (False, True)}
    for seqlen in (*lengths.LENGTHS, *lengths.DRAWN, 32768, 65536):
        mine = [s for s in cells if s.seqlen == seqlen and s.seqlen_k is None and s.heads == s.kv_heads]
        assert {(s.head_dim, s.causal) for s in mine} == masks
        if seqlen < 32768:
            assert all(s.batch == max(1, 16384 // seqlen) for s in mine if s != lengths.SD35)
            assert all(s.heads * s.head_dim == 2048 for s in mine if s != lengths.SD35)
    groups = {
        (s.head_dim, s.seqlen, s.heads, s.kv_heads) for s in cells if s.heads > s.kv_heads and not s.seqlen_k
    }
    unlike = [s for s in cells if s.seqlen_k is not None]
    assert len(groups) == len(unlike) == 12
    assert all(s.seqlen != s.keys for s in unlike) and {s.causal for s in unlike} == {False, True}
    # Queries that see no key are no benchmark.
    assert all(s.seqlen <= s.keys for s in unlike if s.causal)
    for s in cells:
        assert s.heads % s.kv_heads == 0 and 512 <= s.batch * s.seqlen <= 65536
    kinds = list(map(lengths.kind, cells))
    assert sum(a != b for a, b in zip(kinds, kinds[1:], strict=False)) == len(set(kinds)) - 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 9), (9, 5), (1, 7), (7, 1), (16, 16), (3, 64)])
def test_operations_are_those_of_the_visible_pairs(queries, keys, causal):
    visible = sum(c <= r + keys - queries or not causal for r in range(queries) for c in range(keys))
    shape = Shape(64, causal, queries, 3, 4, 2, keys)
    assert counted_pairs(shape) == visible
    assert flop(shape) == 5 * 2 * 64 * 3 * 4 * visible


@pytest.mark.parametrize("causal", [False, True])
def test_a_square_counts_as_in_the_paper(causal):
    """Half of all pairs under a mask, not one half of a pair a query more: old records are so."""
    shape = Shape(128, causal, 96, 2, 4, 4)
    assert flop(shape) == 10 * 2 * 4 * 96**2 * 128 * (0.5 if causal else 1)


def test_rows_and_names_of_squares_are_what_they_were():
    """Committed records have them; a row of queries and keys of unlike number says so."""
    square = Shape(128, True, 2048, 8, 16, 16)
    assert cell_name(square) == "d128-causal-n2048-b8-h16-kv16"
    assert "seqlen_k" not in describe(square) and tables.cell_of(describe(square)) == square
    unlike = square._replace(seqlen_k=512)
    assert cell_name(unlike) == "d128-causal-n2048-k512-b8-h16-kv16"
    assert tables.cell_of(json.loads(json.dumps(describe(unlike)))) == unlike
    for kind, record in records.committed().items():
        if kind in records.SWEEPS:
            assert {r["cell"] for r in record["rows"]} == {
                cell_name(tables.cell_of(r)) for r in record["rows"]
            }


def test_inputs_have_the_keys_that_a_shape_says():
    sizes = [tuple(x.shape) for x in inputs(SMALL._replace(seqlen_k=70), "cpu")]
    assert sizes == [(1, 192, 4, 64), (1, 70, 2, 64), (1, 70, 2, 64), (1, 192, 4, 64)]


def test_a_cell_in_words():
    words = {
        "d 64 full 4250": Shape(64, False, 4250, 3, 32, 32),
        "d 64 full 4250, 24 heads": lengths.SD35,
        "d 64 full 8500": Shape(64, False, 8500, 1, 32, 32),
        "d 128 causal 8k, one sequence": Shape(128, True, 8192, 1, 16, 16),
        "d 128 causal 2k x 8k, 32/8 heads": Shape(128, True, 2048, 2, 32, 8, 8192),
    }
    assert {tables.cell_words(cell): cell for cell in words.values()} == words


def test_cudnn_is_not_timed_under_another_mask():
    """It would start the causal mask at the first key, where the others end it at the last."""
    (cudnn,) = systems.peer_systems(["cudnn"], None)
    with pytest.raises(NotImplementedError, match="aligns a causal mask"):
        cudnn.backward(inputs(SMALL._replace(seqlen_k=70), "cpu"), True)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 213, 300])
def test_parts_are_all_of_the_cells(count):
    parts = [lengths.Part(number, count).of(lengths.FULL) for number in range(1, count + 1)]
    assert [cell for part in parts for cell in part] == list(lengths.FULL)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/2", "1/2/3", "-1/2", "1/-2", "1.5/2"])
def test_what_is_no_part_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        lengths.main([f"--part={text}"])
    assert "is no I/N with 1 <= I <= N" in capsys.readouterr().err


class Refuses(Math):
    """A peer that takes no more keys than queries."""

    def fwd(self, q, k, v, causal):
        if k.shape[1] > q.shape[1]:
            raise ValueError("too many keys")
        return super().fwd(q, k, v, causal)


@pytest.fixture
def small_lengths(monkeypatch):
    """`lengths` with small cells, on the CPU, with a clock that tells how it was set."""
    cells = (SMALL, SMALL._replace(seqlen_k=100), SMALL._replace(seqlen_k=300), SMALL._replace(causal=False))
    set_to = []

    def clock(run, lead_in, timed):
        set_to.append((lead_in, timed))
        run()
        return 2.0

    original = backward.measure_cell
    monkeypatch.setattr(lengths, "FULL", cells)
    monkeypatch.setattr(lengths, "QUICK", cells[:1])
    monkeypatch.setattr(clocks, "short_median", clock)
    monkeypatch.setattr(harness, "require_kernels", lambda: None)
    monkeypatch.setattr(
        backward, "measure_cell",
        lambda *a, **more: original(*a, **more, matmul=lambda: None, device="cpu"),
    )  # fmt: skip
    return set_to


def test_a_record_of_lengths_is_made_in_parts_and_merged(small_lengths, tmp_path, capsys):
    paths = [tmp_path / name for name in ("whole.json", "first.json", "second.json", "merged.json")]
    assert lengths.main(["--out", str(paths[0])]) == 0
    assert set(small_lengths) == {(lengths.LEAD_IN_MS, lengths.TIMED_MS)}
    assert len(small_lengths) == 4 * 3 * lengths.ROUNDS  # auto, unordered, the matmul
    for number in (1, 2):
        assert lengths.main(["--part", f"{number}/2", "--out", str(paths[number])]) == 0
    parts = [json.loads(path.read_text()) for path in paths[1:3]]
    assert [part["part"] for part in parts] == ["1/2", "2/2"] and len(parts[0]["rows"]) == 4
    # In any order.
    assert lengths.main(["--merge", str(paths[2]), str(paths[1]), "--out", str(paths[3])]) == 0
    text = capsys.readouterr().out
    assert "4 cells; written to" in text and "Not measured" not in text
    # One part alone says which cells are left.
    assert lengths.main(["--merge", str(paths[1]), "--out", str(tmp_path / "some.json")]) == 0
    left = ",".join(map(cell_name, lengths.FULL[2:]))
    assert f"Not measured: --cells {left}\n" in capsys.readouterr().out
    whole, merged = (json.loads(paths[i].read_text()) for i in (0, 3))
    assert "part" not in merged and merged.keys() == whole.keys()
    for key in ("kind", "form", "rounds", "lead_in_ms", "timed_ms", "rows"):
        assert merged[key] == whole[key], key
    assert merged["environment"]["date"] == min(part["environment"]["date"] for part in parts)
    assert merged["seconds"] == pytest.approx(sum(part["seconds"] for part in parts), abs=0.06)


def test_the_quick_lengths_have_the_clock_of_the_sweep(small_lengths, tmp_path, monkeypatch):
    assert lengths.main(["--quick", "--rounds", "2", "--out", str(tmp_path / "x.json")]) == 0
    assert small_lengths == [(clocks.LEAD_IN_MS, clocks.TIMED_MS)] * 6
    assert json.loads((tmp_path / "x.json").read_text())["lead_in_ms"] == clocks.LEAD_IN_MS
    # Its merged parts are no full record.
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    assert lengths.main(["--merge", str(tmp_path / "x.json")]) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["lengths_quick.json"]


def test_a_sweep_says_how_long_it_takes(small_lengths, tmp_path, capsys):
    """Each of a round's series lasts at least its lead-in and what is timed; long calls need more."""
    assert lengths.main(["--out", str(tmp_path / "x.json")]) == 0
    matmul = 2 * harness.MATMUL_SIZE**3 / backward.SPEED / 1e9
    at_least = 4 * lengths.ROUNDS * (3 * (lengths.LEAD_IN_MS + lengths.TIMED_MS) + 6 * matmul) / 1e3
    assert f"4 cells, 2 systems: about {at_least / 60:.1f} minutes" in capsys.readouterr().out
    assert backward.estimate(lengths.FULL, 2, lengths.ROUNDS, 40, 12) == pytest.approx(at_least, rel=0.01)
    # Beside so long a call the lead-in is nothing: 8 calls in each of 2 rounds, and 2 before.
    long = Shape(128, False, 1 << 19, 1, 1, 1)
    seconds = 3 * (2 + 2 * 8) * flop(long) / backward.SPEED / 1e12
    assert backward.estimate([long], 3, 2, 1, 1) == pytest.approx(seconds, rel=0.01)


def test_all_cells_with_four_peers_fit_into_ten_minutes():
    seconds = backward.estimate(lengths.FULL, 6, lengths.ROUNDS, lengths.LEAD_IN_MS, lengths.TIMED_MS)
    assert seconds < 480  # the rest is for inputs and first calls


def test_a_peer_that_refuses_a_shape_has_errors_there(small_lengths, tmp_path, capsys):
    path = peer_module(tmp_path)
    path.write_text("from test_evaluation import Refuses\n\n\ndef load(name):\n    return Refuses()\n")
    out = tmp_path / "x.json"
    assert lengths.main(["--peers", "some", "--peers-path", str(path), "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    failed = [(r["cell"], r["system"]) for r in rows if "error" in r]
    name = cell_name(SMALL._replace(seqlen_k=300))
    assert failed == [(name, "some+"), (name, "some-")] and len(rows) == 4 * 4
    assert "| some+ | 1 | ValueError: too many keys |" in capsys.readouterr().out


def test_a_part_needs_a_place_of_its_own(small_lengths):
    with pytest.raises(SystemExit, match="--part: say with --out"):
        lengths.main(["--part", "1/2"])


def test_peers_are_called_beforehand_once_a_kind(small_lengths, tmp_path, monkeypatch, capsys):
    path = peer_module(tmp_path)
    seen = []
    monkeypatch.setattr(lengths, "inputs", lambda shape, device: seen.append(shape) or inputs(shape, "cpu"))
    monkeypatch.chdir(tmp_path)
    arguments = ["--warm", "--peers", "math", "--peers-path", str(path)]
    assert lengths.main(arguments) == 0
    assert sorted(map(lengths.kind, seen)) == [(64, False, 2), (64, True, 2)] and small_lengths == []
    seen.clear()
    assert lengths.main([*arguments, "--part", "1/2"]) == 0 and len(seen) == 1
    assert lengths.main(["--warm", "--peers", "broken", "--peers-path", str(path)]) == 1
    assert "FAILED broken+: RuntimeError: not loaded: OSError: no such library" in capsys.readouterr().out


def part_record(rows, **more):
    return {
        "kind": "lengths", "form": "full", "environment": environment(), "rounds": 3, "lead_in_ms": 40,
        "timed_ms": 12, "part": "1/2", "seconds": 5.0, "rows": rows, **more,
    }  # fmt: skip


def test_a_cell_that_failed_in_one_part_comes_from_another():
    first, second = lengths.FULL[:2]
    broken = [{**describe(first), "error": "GpuLost: x"}, {**describe(second), "error": "GpuLost: x"}]
    again = [row("auto", 1.0, first), {**describe(first), "system": "fa3+", "error": "RuntimeError: no"}]
    for parts in ([broken, again], [again, broken]):
        merged = lengths.merged([part_record(rows) for rows in parts])
        assert merged["rows"] == [*again, broken[1]] and merged["seconds"] == 10.0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"kind": "backward"}, "kind is lengths in one and backward in another"),
        ({"form": "quick"}, "form is full"),
        ({"rounds": 5}, "rounds is 3 in one and 5"),
        ({"lead_in_ms": 100}, "lead_in_ms is 40"),
        ({"environment": environment() | {"commit": "d" * 40}}, "commit is c"),
        ({"environment": environment(device="another")}, "device is a GPU in one and another in another"),
        ({}, "d128-full-n512-b32-h16-kv16 is measured in two"),
    ],
)
def test_records_that_do_not_belong_together_are_not_merged(other, words, tmp_path):
    parts = [part_record([row("auto", 1.0)]), part_record([row("auto", 1.0)], **other)]
    with pytest.raises(ValueError, match=words):
        lengths.merged(parts)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, parts, strict=True):
        harness.write_json(path, part)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match=f"benchmarks: --merge: .*{words}"):
        lengths.main(["--merge", *map(str, paths), "--out", str(out)])
    assert not out.exists()


def test_merged_changes_are_told():
    changed = part_record([row("auto", 1.0)], environment=environment() | {"uncommitted_changes": True})
    merged = lengths.merged([part_record([]), changed])
    assert merged["environment"]["uncommitted_changes"] is True


def test_errors_are_measured_against_float64(tmp_path):
    chosen = [systems.our_system("auto"), *systems.peer_systems(["math"], peer_module(tmp_path))]
    ours, right, wrong = accuracy.measure_cell(SMALL, chosen, "cpu")
    assert all(0 < r[name] < 0.01 for r in (ours, right) for name in systems.GRADIENTS)
    assert wrong["dq"] == pytest.approx(1.0) and wrong["dk"] < 0.01


def test_deviations_between_runs_are_found():
    class Wavering(systems.Ours):
        runs = 0

        def bwd(self, *arguments):
            self.runs += 1
            dq, dk, dv = super().bwd(*arguments)
            return dq, dk + 0.5 * (self.runs == 3), dv

    steady, wavering = systems.our_system("auto"), systems.System("unordered", Wavering("auto"), False)
    first, second = reproducibility.measure_runs(SMALL, [steady, wavering], 4, "cpu")
    assert first["bitwise_equal"] and [first[n] for n in systems.GRADIENTS] == [0, 0, 0]
    assert not second["bitwise_equal"] and second["dk"] == pytest.approx(0.5, rel=0.05) and second["dq"] == 0


def test_two_training_runs_are_compared():
    sizes = demo.Sizes(1, 1, 64, 1, 130, 3)
    (same,) = reproducibility.measure_training(systems.our_system("auto"), sizes, "cpu")
    assert same["bitwise_equal"] and same["weights_that_differ"] == 0 and same["steps"] == 3
    calls = 0

    class Wavering(systems.System):
        def attention(self, q, k, v, causal):
            nonlocal calls
            calls += 1
            return super().attention(q, k, v, causal) * (1 + 1e-6 * (calls > 3))

    (other,) = reproducibility.measure_training(
        Wavering("unordered", systems.Ours("auto"), False), sizes, "cpu"
    )
    assert not other["bitwise_equal"] and 0 < other["weights_that_differ"] <= other["parameters"]
    assert other["greatest_deviation"] > 0


def test_the_trained_model_has_thirty_million_parameters():
    with torch.device("meta"):
        model = demo.Model(reproducibility.TRAINED, demo.default_attention)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(30e6, rel=0.03)


def test_cpu_time_of_a_call_is_a_median_over_bunches():
    ticks = iter([0.0, 5.0, 10.0, 10.2, 20.0, 20.6, 30.0, 30.4])  # the first bunch warms up
    (found,) = call_cost.measure_cell(
        Shape(64, True, 32, 1, 2, 1), [systems.our_system("auto")], 3, calls=2, device="cpu",
        now=lambda: next(ticks),
    )  # fmt: skip
    assert found["us"] == pytest.approx(0.2e6) and found["lowest_us"] == pytest.approx(0.1e6)


# Transformer blocks.


def small(model):
    kv_heads = 2 if model.kv_heads < model.heads else 4
    return replace(
        model, hidden=4 * model.head_dim, heads=4, kv_heads=kv_heads, mlp=96, extra=7 if model.extra else 0
    )


@pytest.mark.parametrize("model", blocks.MODELS, ids=lambda model: model.name)
def test_blocks_run_with_every_attention(model, tmp_path):
    """In float32, where ours and torch's own give the same block."""
    cell = blocks.BlockCell(small(model), 40)
    torch.manual_seed(0)
    block = blocks.KINDS[model.kind](cell.model, 40)
    x = torch.randn(2, 40 + cell.model.extra, cell.model.hidden, requires_grad=True)
    wanted = [x, *block.parameters()]
    peer = systems.peer_systems(["math"], peer_module(tmp_path))[0]
    ours, theirs = (
        torch.autograd.grad(block(x, s.attention).square().mean(), wanted)
        for s in (systems.our_system("auto"), peer)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    rows = blocks.measure_cell(
        cell, [systems.our_system("naive"), systems.our_system("auto"), *systems.peer_systems(["fa4"], None)],
        2, clock=lambda run: len(run()), device="cpu", dtype=torch.float32, tokens=80,
    )  # fmt: skip
    assert [r["repeats"] for r in rows[:2]] == [True, True] and rows[0]["ms"] == len(wanted)
    assert all("--peers-path" in r["error"] for r in rows[2:])
    assert rows[0]["model"] == model.name and rows[0]["causal"] == (model.kind == "language")


def test_a_token_goes_to_its_two_likeliest_experts():
    torch.manual_seed(0)
    mlp = blocks.TwoExperts(16, 24, 4).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    best, taken = mlp.router(x).float().topk(2, dim=-1)
    every = torch.stack([expert(x) for expert in mlp.experts], dim=2)
    picked = every.gather(2, taken.unsqueeze(-1).expand(-1, -1, -1, 16))
    expected = (picked * best.softmax(-1).double().unsqueeze(-1)).sum(2)
    found = mlp(x)
    torch.testing.assert_close(found, expected)
    wanted = [x, *mlp.parameters()]
    for a, b in zip(
        torch.autograd.grad(found.sin().sum(), wanted), torch.autograd.grad(expected.sin().sum(), wanted),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_sizes_of_the_real_blocks():
    """Weights a layer, as the models' own numbers of parameters have it."""
    millions = {}
    for model in blocks.MODELS:
        with torch.device("meta"):
            block = blocks.KINDS[model.kind](model, model.quick)
        millions[model.name] = sum(p.numel() for p in block.parameters()) / 1e6
        assert model.heads * model.head_dim == model.hidden
    assert millions["LLaMA3-8B"] == pytest.approx((8030 - 2 * 128256 * 4096 / 1e6) / 32, rel=0.005)
    assert millions["Qwen2.5-7B"] == pytest.approx((7616 - 2 * 152064 * 3584 / 1e6) / 28, rel=0.005)
    assert millions["Mixtral-8x7B"] == pytest.approx((46703 - 2 * 32000 * 4096 / 1e6) / 32, rel=0.005)
    assert millions["SAM ViT-L"] == pytest.approx(12 * 1024**2 / 1e6, rel=0.01)


# Bits.


def test_the_fixed_inputs_never_change():
    """By hash: other inputs would make every accepted hash worthless."""
    case = bits.BitCase(70, 90, 4, 2, 64, "bf16", True, batch=2)
    tensors = bits.inputs(case, "cpu")
    assert [tuple(x.shape) for x in tensors] == [
        (2, 70, 4, 64), (2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), (2, 70, 4, 64), (2, 4, 70),
    ]  # fmt: skip
    assert all(x.isfinite().all() for x in tensors)
    assert tensors[1].float().mean().abs() < 0.02
    assert tensors[1].float().var().item() == pytest.approx(1 / 3, rel=0.05)
    assert bits.digest(tensors) == "8ad3a9644932ca139beafb3e1ce19349"


def test_the_hash_sees_one_bit():
    x = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)
    others = [
        torch.tensor([-0.0, 1.0], dtype=torch.bfloat16), x.view(2, 1), x.view(torch.int16), x.half(),
        torch.tensor([0.0, 1.0078125], dtype=torch.bfloat16),
    ]  # fmt: skip
    assert bits.digest([x]) == bits.digest([x.clone()])
    assert len({bits.digest([y]) for y in (x, *others)}) == 6
    column = torch.arange(6.0).view(3, 2).t()
    assert bits.digest([column]) == bits.digest([column.contiguous()])


def test_hashes_of_a_case_repeat_and_depend_on_the_schedule():
    case = bits.BitCase(300, 400, 2, 1, 128, "fp16", False)
    found = bits.hashes(case, "cpu")
    assert found == bits.hashes(case, "cpu") and found["auto"] == "shift"
    assert found["shift"]["dq"] != found["naive"]["dq"] and found["inputs"] != found["shift"]["dq"]


def test_differing_bits_are_named():
    accepted = {"cases": {"a": hashes(), "b": hashes(), "c": hashes(), "d": hashes(), "e": hashes()}}
    found = {
        "cases": {
            "a": hashes(), "b": hashes(dq="7"), "c": hashes(auto="naive"), "d": hashes(dq="7", inputs="1"),
            "new": hashes(), "broken": {"error": "RuntimeError: x"},
        }
    }  # fmt: skip
    assert bits.compare(accepted, accepted) == []
    assert bits.compare(accepted, found) == [
        "b, shift: dq",
        "c: auto is naive, was shift",
        "d: other inputs, so nothing can be said of the gradients",
        "e: not computed",
        "broken: RuntimeError: x",
    ]


def test_the_bits_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bits, "CASES", (bits.BitCase(64, 64, 1, 1, 64, "bf16", True),))
    path = tmp_path / "accepted.json"
    arguments = ["--device", "cpu", "--accepted", str(path)]
    assert bits.main([*arguments, "--out", str(path)]) == 0
    assert bits.main(arguments) == 0 and "All bits are the accepted ones." in capsys.readouterr().out
    record = json.loads(path.read_text())
    next(iter(record["cases"].values()))["naive"]["dv"] = "other"
    path.write_text(json.dumps(record))
    assert bits.main(arguments) == 1 and "naive: dv" in capsys.readouterr().out


# The soak.


@pytest.mark.parametrize("sms", [132, 114, 64])
def test_random_cases_are_valid_and_their_names_read_back(sms):
    rng = random.Random(0)
    drawn = [soak.draw(rng, sms) for _ in range(3000)]
    for case in drawn:
        assert soak.SoakCase.parse(str(case)) == case
        assert case.heads_q % case.heads_k == 0
        assert min(case.batch, case.heads_k, case.seqlen_q, case.seqlen_k) >= 1
        assert case.batch * case.heads_q * case.seqlen_q * case.seqlen_k <= soak.MOST_SCORES
        assert 0 <= case.sm_margin < sms
        assert case.schedule in ("naive", "descending") or sms - case.sm_margin >= 64
    for field in ("head_dim", "dtype", "causal", "schedule", "load"):
        counts = [
            sum(getattr(c, field) == value for c in drawn) for value in {getattr(c, field) for c in drawn}
        ]
        assert len(counts) > 1 and min(counts) > 500, field
    assert sum(c.seqlen_q == c.seqlen_k for c in drawn) > 1000
    assert sum(c.seqlen_q % 64 in (0, 1, 63) for c in drawn) > 1000
    assert max(c.seqlen_q for c in drawn) > 8192 and min(c.seqlen_q for c in drawn) == 1


def test_a_seed_is_a_sequence_of_cases():
    first, second, other = (soak.cases(seed, 132, 1 << 20) for seed in (5, 5, 6))
    assert (
        [next(first) for _ in range(20)]
        == [next(second) for _ in range(20)]
        != [next(other) for _ in range(20)]
    )


def test_names_that_are_no_case_are_refused(capsys):
    good = str(soak.draw(random.Random(1), 132))
    for bad in ("", good + "x", good.replace("-d", "-e"), re.sub("-[a-z_]+-m", "-best-m", good)):
        with pytest.raises(ValueError, match="is no case"):
            soak.SoakCase.parse(bad)
    with pytest.raises(SystemExit):
        soak.main(["--device", "cpu", "--case", "nonsense"])
    assert "'nonsense' is no case" in capsys.readouterr().err


SOAK = ["--device", "cpu", "--seed", "3", "--most-scores", "30000", "--seconds", "2"]


def test_the_soak_passes_on_the_reference(tmp_path, capsys):
    path = tmp_path / "soak.json"
    assert soak.main([*SOAK, "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["cases"] > 3 and record["failed"] == [] and record["seed"] == 3
    assert "seed 3" in capsys.readouterr().out


def broken(monkeypatch, change):
    """Our CPU backward with `change(number of the call, dq)` as its dq, the yardstick left alone."""
    original, calls = reference.backward, []

    class Broken:
        forward = staticmethod(reference.forward)

        @staticmethod
        def backward(*arguments):
            calls.append(1)
            dq, dk, dv = original(*arguments)
            return change(len(calls), dq), dk, dv

    monkeypatch.setattr(ops, "reference", Broken)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda call, dq: dq + 0.25 * (call % 4 == 2), r"dq of run 1 differs in \d+ numbers"),
        (lambda call, dq: dq * 1.05, "dq has an error of"),
        (lambda call, dq: dq * math.nan, "dq has an error of nan"),
    ],
)
def test_a_failure_prints_the_command_that_repeats_it(change, words, monkeypatch, tmp_path, capsys):
    broken(monkeypatch, change)
    path = tmp_path / "soak.json"
    case = "b1-q130-k200-h4-kv2-d64-bf16-full-naive-m0-quiet-s7"
    assert soak.main(["--device", "cpu", "--case", case, "--out", str(path)]) == 1
    text = capsys.readouterr().out
    assert re.search(words, text)
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("python -m benchmarks")]
    record = json.loads(path.read_text())
    assert record["failed"][0]["command"] == line and record["failed"][0]["case"] == case
    program, *rest = shlex.split(line)
    assert (program, rest[:3]) == ("python", ["-m", "benchmarks", "soak"])
    assert soak.main([*rest[3:], "--device", "cpu"]) == 1
    assert re.search(words, capsys.readouterr().out)
    monkeypatch.undo()
    assert soak.main([*rest[3:], "--device", "cpu"]) == 0


def test_a_case_that_raises_is_a_failure_and_the_soak_goes_on(monkeypatch):
    def check(case, device):
        if case.seed == 1:
            raise RuntimeError("unspecified launch failure")
        return []

    monkeypatch.setattr(soak, "check", check)
    drawn = [soak.draw(random.Random(0), 132)._replace(seed=seed) for seed in range(3)]
    record = soak.soak(iter(drawn), math.inf, "cpu")
    assert record["cases"] == 3
    assert [f["problems"] for f in record["failed"]] == [["RuntimeError: unspecified launch failure"]]

    def lost():
        raise harness.GpuLost("gone")

    monkeypatch.setattr(harness, "check_gpu", lost)
    assert soak.soak(iter(drawn), math.inf, "cpu")["cases"] == 2


# Comparison and verdict.


@pytest.mark.parametrize(("part", "slower"), [(1.2, 0), (1.0, 0), (0.9701, 0), (0.9699, 1), (0.5, 1)])
def test_more_than_three_percent_is_slower(part, slower):
    found = compare.slower([row("auto", 400.0)], [row("auto", 400.0 * part)])
    assert len(found) == slower


def test_speed_is_compared_as_a_ratio_to_the_matmul():
    cooler = [row("auto", 438.0, matmul=800.0)]
    (found,) = compare.slower([row("auto", 400.0, matmul=700.0)], cooler)
    assert str(found) == "d 128 full 512, auto: 4.2% slower (0.571 of the matmul, now 0.547)"
    assert compare.slower_cells([row("auto", 400.0)], cooler) == [cell_name(PAPER_SHAPES[0])]


def test_peers_and_new_cells_are_not_judged():
    old = [row("auto", 400.0), row("fa3+", 400.0)]
    new = [row("auto", 400.0), row("fa3+", 100.0), row("auto", 1.0, PAPER_SHAPES[1])]
    assert compare.slower(old, new) == [] and compare.missing(old, new) == []


def test_a_cell_that_is_gone_is_a_problem_and_a_failed_one_is_told_once():
    failed = {**describe(PAPER_SHAPES[0]), "system": "shift", "error": "RuntimeError: x"}
    verdict = compare.judge(night([failed]), ACCEPTED, ACCEPTED_BITS)
    assert not verdict.passed
    assert verdict.problems == {
        "cells": ["d128-full-n512-b32-h16-kv16 shift: RuntimeError: x", "d 128 full 512, auto: not measured"]
    }
    whole = {**describe(PAPER_SHAPES[0]), "error": "GpuLost: x"}
    verdict = compare.judge(night([whole]), ACCEPTED, ACCEPTED_BITS)
    assert verdict.problems == {"cells": ["d128-full-n512-b32-h16-kv16: GpuLost: x"]}


def test_a_good_night_passes():
    verdict = compare.judge(night(), ACCEPTED, ACCEPTED_BITS)
    assert verdict.passed and verdict.lines() == ["PASSED"] and verdict.accepted == "accepted.json"


@pytest.mark.parametrize(
    ("record", "kind", "words"),
    [
        (night([row("auto", 380.0), row("shift", 390.0)]), "slower", "d 128 full 512, auto: 5.0% slower"),
        (night(found={"case": hashes(dq="8")}), "bits", "case, shift: dq"),
        (night(soak_failed=["c1"]), "soak", "dq differs: run c1"),
        (night(tests_failed=["tests/x"]), "tests", "tests/x"),
        (night() | {"soak": None}, "soak", "left no record"),
        (night() | {"tests": None}, "tests", "left no record"),
        (night() | {"bits": None}, "bits", "no hashes"),
        (night() | {"backward": None}, "cells", "the quick sweep left no record"),
        (night() | {"lengths": None}, "cells", "the lengths left no record"),
        (
            night() | {"lengths": sweep_record(other_lengths(480.0))},
            "slower",
            "d 128 full 4k x 512, auto: 4.0% slower",
        ),
        (night() | {"soak": night()["soak"] | {"cases": 0}}, "soak", "no case ran"),
        (
            night() | {"tests": night()["tests"] | {"passed": 0}},
            "tests",
            "exit status 0, 0 passed",
        ),
    ],
)
def test_each_kind_of_problem_fails_the_night(record, kind, words):
    verdict = compare.judge(record, ACCEPTED, ACCEPTED_BITS)
    assert not verdict.passed and list(verdict.problems) == [kind]
    assert any(line.startswith(f"{kind}: ") and words in line for line in verdict.lines())
    assert verdict.as_json()["passed"] is False


def test_without_anything_accepted_a_night_does_not_pass():
    verdict = compare.judge(night(), None, None)
    assert verdict.problems == {"baseline": ["no accepted times of a GPU", "no accepted bits"]}


def test_new_bits_and_uncommitted_changes_are_noted():
    record = night(found={"case": hashes(), "more": hashes()})
    record["environment"]["uncommitted_changes"] = True
    verdict = compare.judge(record, ACCEPTED, ACCEPTED_BITS)
    assert verdict.passed
    assert verdict.notes == ["bits of more are new", "the working tree has uncommitted changes"]


def test_a_sweep_that_the_accepted_record_lacks_is_new_and_later_compared(shelf):
    """Records that were accepted before there was a sweep of lengths have none."""
    older = {key: value for key, value in night().items() if key != "lengths"}
    verdict = compare.judge(night(), (Path("older.json"), older), ACCEPTED_BITS)
    assert verdict.passed
    assert verdict.notes == ["the cells of the lengths are new: older.json has none"]
    failed = night() | {"lengths": sweep_record([{**describe(lengths.QUICK[0]), "error": "RuntimeError: x"}])}
    verdict = compare.judge(failed, (Path("older.json"), older), ACCEPTED_BITS)
    assert verdict.problems == {"cells": ["d128-full-n4250-b3-h16-kv16: RuntimeError: x"]}
    # Once such a night is accepted, the next one is compared with it.
    path, *_ = accept.accept(judged(night(), (Path("older.json"), older)), None, **shelf)
    slower = night() | {"lengths": sweep_record(other_lengths(400.0))}
    verdict = compare.judge(slower, (path, harness.read_json(path)), ACCEPTED_BITS)
    assert len(verdict.problems["slower"]) == 2 * len(lengths.QUICK)
    with pytest.raises(accept.NotAcceptable, match="not complete"):
        accept.accept(judged(night()) | {"lengths": None}, None, **shelf)


def test_the_last_accepted_record_is_the_newest_of_the_same_gpu(tmp_path):
    for name, device in (("20260101", "H200"), ("20260102", "H200"), ("20260103", "H100")):
        harness.write_json(tmp_path / f"{name}.json", night(device=device))
    path, record = compare.last_accepted("H200", tmp_path)
    assert path.name == "20260102.json" and record["environment"]["device"] == "H200"
    assert compare.last_accepted("B200", tmp_path) is None


# The nightly run, with its steps replaced.


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Folders of a project in which something is accepted, and nights that leave what a test says."""
    history, bits_path = tmp_path / "history", tmp_path / "bits.json"
    harness.write_json(history / "20260101.json", {k: v for k, v in night().items() if k != "bits"})
    harness.write_json(bits_path, ACCEPTED_BITS)
    monkeypatch.setattr(harness, "require_kernels", lambda: None)
    monkeypatch.setattr(harness, "environment", environment)
    monkeypatch.setattr(bits, "ACCEPTED", bits_path)
    monkeypatch.setattr(compare, "HISTORY", history)
    steps = []

    def run(record, again=None):
        parts = {"GPU tests": "tests", "quick sweep": "backward"}

        def step(title, out, *arguments, environment=None):
            steps.append((title, arguments))
            return again if title.endswith("again") else record[parts.get(title, title)]

        monkeypatch.setattr(nightly, "step", step)
        return nightly.main(["--folder", str(tmp_path / "out")])

    run.steps, run.out = steps, tmp_path / "out"
    return run


def test_a_night(project, capsys):
    assert project(night()) == 0
    assert "PASSED" in capsys.readouterr().out
    record = json.loads((project.out / "record.json").read_text())
    assert record["verdict"] == {"passed": True, "problems": {}, "notes": [], "accepted": "20260101.json"}
    assert "PASSED" in (project.out / "report.html").read_text()
    assert [title for title, _ in project.steps] == ["GPU tests", "quick sweep", "lengths", "bits", "soak"]
    assert project.steps[2][1][2:6] == ("lengths", "--quick", "--rounds", str(clocks.ROUNDS))


def test_a_slow_cell_is_measured_again_before_it_counts(project, capsys):
    slow = night([row("auto", 300.0), row("shift", 390.0)])
    assert project(slow, sweep_record([row("auto", 398.0), row("shift", 1.0, error="x")])) == 0
    assert project.steps[2][0] == "1 cells again"
    assert project.steps[2][1][-3] == "d128-full-n512-b32-h16-kv16"
    assert project.steps[2][1][2:6] == ("backward", "--quick", "--rounds", str(3 * clocks.ROUNDS))
    assert project(slow, sweep_record([row("auto", 302.0), row("shift", 390.0)])) == 1
    assert "slower: d 128 full 512, auto: 24.5% slower" in capsys.readouterr().out


def test_a_slow_cell_of_another_length_is_measured_again_too(project):
    slow = night() | {
        "lengths": sweep_record([*other_lengths()[:-1], row("unordered", 1, lengths.QUICK[-1])])
    }
    again = sweep_record([row(name, 499.0, lengths.QUICK[-1]) for name in ("auto", "unordered")])
    assert project(slow, again) == 0
    title, arguments = project.steps[3]
    assert title == "1 cells again" and arguments[2] == "lengths"
    assert arguments[-3] == cell_name(lengths.QUICK[-1])


def test_a_bad_night_says_what_is_wrong(project, capsys):
    assert project(night(found={"case": hashes(dq="8")}, soak_failed=["c"])) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "bits: case, shift: dq" in text and "soak: dq differs: run c" in text
    assert "accept --because" not in text
    assert project(night(found={"case": hashes(dq="8")})) == 1
    assert "accept --because" in capsys.readouterr().out


def test_a_step_is_a_process_that_leaves_a_record_or_not(tmp_path, capsys):
    out = tmp_path / "x.json"
    out.write_text("an older one")
    assert nightly.step("nothing", out, "-c", "raise SystemExit(3)") is None
    assert "nothing: exit status 3" in capsys.readouterr().out
    code = "import os; open(os.environ['WHERE'], 'w').write('{\"a\": 1}')"
    assert nightly.step("record", out, "-c", code, environment={"WHERE": str(out)}) == {"a": 1}


# Accepting.


@pytest.fixture
def shelf(tmp_path):
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\nIntroduction.\n\n## 0.2.0\n\n- Old entry.\n\n## 0.1.0\n\n- First.\n")
    return {"history": tmp_path / "history", "bits_path": tmp_path / "bits.json", "changelog": changelog}


def judged(record, accepted=ACCEPTED, accepted_bits=ACCEPTED_BITS):
    return record | {"verdict": compare.judge(record, accepted, accepted_bits).as_json()}


def test_the_first_record_and_an_equal_one_are_accepted(shelf):
    written = accept.accept(judged(night(), None, None), None, **shelf)
    assert [p.name for p in written] == ["20260102T030405_cccccccccccc.json", "bits.json"]
    assert json.loads(shelf["bits_path"].read_text()) == ACCEPTED_BITS
    kept = json.loads(written[0].read_text())
    assert "bits" not in kept and kept["backward"]["rows"] == night()["backward"]["rows"]
    assert len(accept.accept(judged(night()), None, **shelf)) == 2
    assert compare.last_accepted("a GPU", shelf["history"])[0] == written[0]


def test_other_bits_need_a_reason_and_the_changelog_tells_it(shelf):
    harness.write_json(shelf["bits_path"], ACCEPTED_BITS)
    other = judged(night(found={"case": hashes(dq="8")}))
    with pytest.raises(accept.NotAcceptable, match="case, shift: dq"):
        accept.accept(other, None, **shelf)
    assert not shelf["history"].exists()
    written = accept.accept(other, "dQ is scaled earlier.", **shelf)
    assert written[-1] == shelf["changelog"]
    text = shelf["changelog"].read_text()
    assert (
        "## 0.2.0\n\n- **The bits change** (1 case of `benchmarks/results/bits.json`): dQ is scaled earlier."
        "\n- Old entry." in text
    )
    assert json.loads(written[0].read_text())["accepted_because"] == "dQ is scaled earlier."
    assert json.loads(shelf["bits_path"].read_text()) == other["bits"]


def test_bits_before_the_first_release_are_no_change(shelf):
    first = "# Changelog\n\n## 0.1.0 (unreleased)\n\n- Attention.\n"
    shelf["changelog"].write_text(first)
    harness.write_json(shelf["bits_path"], ACCEPTED_BITS)
    written = accept.accept(judged(night(found={"case": hashes(dq="8")})), "dQ is scaled earlier.", **shelf)
    assert shelf["changelog"] not in written and shelf["changelog"].read_text() == first
    assert json.loads(written[0].read_text())["accepted_because"] == "dQ is scaled earlier."


def test_slower_cells_need_a_reason_too(shelf):
    slower = judged(night([row("auto", 300.0), row("shift", 390.0)]))
    with pytest.raises(accept.NotAcceptable, match="25.0% slower"):
        accept.accept(slower, None, **shelf)
    before = shelf["changelog"].read_text()
    accept.accept(slower, "Correctness.", **shelf)
    assert shelf["changelog"].read_text() == before


@pytest.mark.parametrize("bad", [{"soak_failed": ["c"]}, {"tests_failed": ["t"]}])
def test_a_broken_night_is_never_accepted(shelf, bad):
    with pytest.raises(accept.NotAcceptable, match="problems with (soak|tests)"):
        accept.accept(judged(night(**bad)), "whatever", **shelf)


def test_accepting_what_is_not_there(tmp_path, capsys):
    assert accept.main([str(tmp_path / "none.json")]) == 1
    assert "not accepted" in capsys.readouterr().out


# Tables.

CAUSAL = next(s for s in PAPER_SHAPES if s.head_dim == 64 and s.causal and s.seqlen == 1024)
SWEEP = [
    *(row(n, x) for n, x in (("naive", 300), ("descending", 310), ("shift", 360), ("symmetric_shift", 350))),
    row("auto", 360), row("unordered", 400), row("fa3+", 250), row("fa3-", 400), row("fa4+", 370),
    {**describe(PAPER_SHAPES[0]), "system": "fa4-", "error": "RuntimeError: out of memory"},
    *(row(n, x, CAUSAL) for n, x in (("naive", 100), ("descending", 150), ("symmetric_shift", 170))),
    row("shift", 180, CAUSAL),
    row("unordered", 150, CAUSAL), row("fa3+", 200, CAUSAL), row("fa3-", 210, CAUSAL),
]  # fmt: skip


def test_headline_numbers():
    found = {line[0]: line[1:] for line in tables.headline(SWEEP).rows}
    first, second = "d 128 full 512", "d 64 causal 1k"
    assert found["Worst cost of determinism: auto against unordered"] == ["10.0 %", first]
    assert found["Worst cost of determinism: fa3+ against fa3-"] == ["37.5 %", first]
    assert "Worst cost of determinism: fa4+ against fa4-" not in found
    assert found["Best gain over naive, full mask"] == ["1.20x", first]
    assert found["Best gain over naive, causal mask"] == ["1.80x", second]
    assert found["Best gain over fa3+"] == ["1.44x", first]
    # auto was not timed in the second cell, but shift was, which it is there.
    mean = math.sqrt(360 / 250 * 180 / 200)
    where = f"1 of 2 cells at 1.00x or more; worst: 0.90x, {second}"
    assert found["auto against fa3+, geometric mean"] == [f"{mean:.2f}x", where]
    best = math.sqrt(360 / 370 * 180 / 200)
    assert found["auto against the fastest deterministic peer, geometric mean"][0] == f"{best:.2f}x"
    best = math.sqrt(360 / 400 * 180 / 210)
    assert found["auto against the fastest peer, geometric mean"][0] == f"{best:.2f}x"


def test_backward_tables_mark_the_best_and_the_failed():
    first, second = tables.backward(SWEEP)
    assert first.header == ["system", "512"]
    lines = dict(first.rows)
    assert lines["unordered"] == lines["fa3-"] == "**400** (0.57)" and lines["fa4-"] == "failed"
    assert "d 64, causal mask, 32 heads" in second.title and dict(second.rows)["fa3+"] == "200 (0.29)"
    whole = [
        {**describe(CAUSAL), "error": "x"},
        row("auto", 5, CAUSAL._replace(seqlen=2048, batch=8)),
    ]
    assert tables.backward(whole)[0].rows == [["auto", "failed", "**5** (0.01)"]]


def test_a_table_as_text_and_as_html():
    table = tables.Table("A & B", ["name", "x<y"], [["**bold**", "1"]])
    assert table.markdown() == "**A & B**\n\n| name | x<y |\n| --- | ---: |\n| **bold** | 1 |"
    text = table.html()
    assert "A &amp; B" in text and "x&lt;y" in text and "<td class=words><b>bold</b></td><td>1</td>" in text


MORE = {
    "blocks": [
        {"cell": "4k", "model": m, "causal": c, "seqlen": 4096, "system": s, "ms": ms, "repeats": True}
        for m, c, times in (("M1", True, (11.0, 10.0, 9.9)), ("M2", False, (20.6, 20.0, 20.0)))
        for s, ms in zip(("naive", "auto", "unordered"), times, strict=True)
    ],
    "reproducibility": [
        {"cell": "c", "system": name, "runs": 10, "bitwise_equal": dq == 0, "dq": dq, "dk": 0.0, "dv": 0.0}
        for name, dq in (("shift", 0.0), ("unordered", 0.5))
    ] + [
        {"cell": "c", "system": "fa3+", "error": "x"},
        {
            "cell": "training", "system": "shift", "bitwise_equal": True, "weights_that_differ": 0,
            "steps": 200, "parameters": 30000000, "greatest_deviation": 0.0, "first_loss": 5.0,
            "last_loss": 2.0, "tokens_per_second": 1e6,
        },
    ],
    "accuracy": [
        {"cell": "c", "system": "shift", "dq": 1e-3, "dk": 2e-3, "dv": 3e-3}, {"cell": "d", "error": "x"},
    ],
    "memory": [
        {"cell": "c", "system": "shift", "extra_bytes": 3 << 20, "extra_in_fp32_dq": 1.5},
        {"cell": "d", "error": "x"},
    ],
    "call_cost": [{"cell": "c", "system": "auto", "us": 80.4}, {"cell": "c", "system": "fa3+", "us": 90.6}],
}  # fmt: skip


def test_tables_of_everything_else():
    assert tables.memory(MORE["memory"]).rows == [["c", "3.0 (1.5000)"], ["d", "failed"]]
    assert tables.call_cost(MORE["call_cost"]).rows == [["c", "80", "91"]]
    assert tables.accuracy(MORE["accuracy"]).rows[1] == ["d", tables.NONE, "failed", "failed", "failed"]
    runs, training = tables.reproducibility(MORE["reproducibility"])
    assert [line[2:4] for line in runs.rows] == [["yes", "0"], ["**no**", "5.00e-01"], ["failed", "failed"]]
    assert "10 runs" in runs.title and "200 steps" in training.title
    assert training.rows == [["shift", "0 of 30,000,000", "0", "5.000 to 2.000", "1,000,000"]]
    blocks_table = tables.blocks(MORE["blocks"])
    assert blocks_table.rows[0] == ["M1", "4k", "11.00", "10.00", "9.90", "1.100x", "0.990x"]
    assert tables.block_summary(MORE["blocks"]).rows[:2] == [
        ["auto against naive, causal mask", "+10.0 %", "+10.0 to +10.0 %"],
        ["auto against naive, full mask", "+3.0 %", "+3.0 to +3.0 %"],
    ]
    for table in (blocks_table, runs, training, *map(tables.accuracy, [MORE["accuracy"]])):
        assert all(len(line) == len(table.header) for line in table.rows)


def record_of_lengths(**speeds):
    """All cells of the record, auto at 110 % of the peers, but for a few that a test gives."""
    rows = []
    for shape in lengths.FULL:
        found = {"auto": 550, "unordered": 520, "fa3+": 400, "fa3-": 500, "fa4+": 450, "fa4-": 490}
        rows += [row(n, x, shape) for n, x in (found | speeds.get(cell_name(shape), {})).items()]
    return part_record(rows)


PLAIN_CELL, CROSS_CELL = (cell_name(lengths.QUICK[i]) for i in (0, 2))


def targets(record):
    return {tuple(line[:2]): line[2:] for line in claims.targets({"lengths": record} if record else {}).rows}


EVERY = [("the fastest peer", "0.97 in every cell"), ("the fastest deterministic peer", "1.00 in every cell"),
         ("unordered", "0.99 in every cell")]  # fmt: skip
MEAN = ("the fastest peer", "1.05 in the geometric mean")


def test_targets_hold_where_every_cell_meets_them():
    found = targets(record_of_lengths())
    assert list(found) == [EVERY[0], MEAN, *EVERY[1:]]
    assert [found[line][0] for line in (*EVERY, MEAN)] == ["yes"] * 4
    assert found[MEAN] == ["yes", "1.100"]
    assert found[EVERY[1]][1].startswith("1.222 at worst")


@pytest.mark.parametrize(
    ("speeds", "line", "worst"),
    [
        ({"fa4-": 568}, EVERY[0], "0.968"),
        ({"fa4+": 551}, EVERY[1], "0.998"),
        ({"unordered": 556}, EVERY[2], "0.989"),
    ],
)
@pytest.mark.parametrize("cell", [PLAIN_CELL, CROSS_CELL])
def test_one_cell_below_is_enough_for_a_target_to_fail(cell, speeds, line, worst):
    record = record_of_lengths(**{cell: speeds})
    found = targets(record)
    words = tables.cell_words(next(s for s in lengths.FULL if cell_name(s) == cell))
    assert found[line] == ["in 212 of 213 cells", f"{worst} at worst ({words})"]
    assert all(found[other][0] == "yes" for other in (*EVERY, MEAN) if other != line)
    (missed,) = tables.below_targets(record["rows"]).rows
    assert missed == [words, line[0], worst, line[1][:4]]


def test_a_mean_below_is_told():
    slow = {cell_name(s): {"auto": 520} for s in lengths.FULL}
    found = targets(record_of_lengths(**slow))
    assert found[MEAN] == ["no", "1.040"] and found[EVERY[0]][0] == "yes"


def test_a_target_does_not_hold_where_auto_failed_or_was_not_measured():
    record = record_of_lengths()
    rows = [r for r in record["rows"] if r["cell"] != PLAIN_CELL]
    failed = {**describe(lengths.QUICK[0]), "system": "auto", "error": "RuntimeError: x"}
    peers = [row("fa3+", 400, lengths.QUICK[0]), row("unordered", 400, lengths.QUICK[0])]
    found = targets({"rows": [*rows, failed, *peers]})
    assert {found[line][0] for line in EVERY} == {"in 212 of 213 cells"}
    assert found[MEAN] == ["so far", "1.100; auto failed in 1 of 213 cells"]
    assert ["d 128 full 4250", "any", "failed", tables.NONE] in tables.below_targets([*rows, failed]).rows
    # A cell that is not there, or that failed as a whole.
    for more in ([], [{**describe(lengths.QUICK[0]), "error": "GpuLost: x"}]):
        found = targets({"rows": [*rows, *more]})
        assert {found[line][0] for line in EVERY} == {"in 212 of 213 cells"}
        assert found[MEAN] == ["so far", "1.100; 1 of 213 cells not measured"]
    # A peer that refuses one is no failure of ours while there is another.
    refused = [r for r in record["rows"] if (r["cell"], r["system"]) != (PLAIN_CELL, "fa3+")]
    assert targets({"rows": refused}) == targets(record)


def test_targets_are_not_measured_without_a_record_or_peers():
    assert set(map(tuple, targets(None).values())) == {(tables.NONE, "not measured yet")}
    alone = [r for r in record_of_lengths()["rows"] if r["system"] in systems.OURS]
    found = targets({"rows": alone})
    assert found[EVERY[2]][0] == "yes"
    assert [found[line] for line in (EVERY[0], MEAN, EVERY[1])] == [[tables.NONE, "not measured yet"]] * 3
    # Nothing is measured where all of it failed.
    assert targets({"rows": [{**describe(s), "error": "x"} for s in lengths.FULL]}) == targets(None)


def test_tables_of_lengths():
    record = record_of_lengths(**{PLAIN_CELL: {"fa3-": 600}, CROSS_CELL: {"auto": 440}})
    refused = {**describe(lengths.QUICK[2]), "system": "cudnn-", "error": "RuntimeError: no"}
    rows = [*record["rows"], refused]
    summary, missed, plain, others, failed = tables.lengths(rows)
    kinds = {line[0]: line[1:] for line in summary.rows}
    assert list(kinds)[:4] == ["d 128 full", "d 128 causal", "d 64 full", "d 64 causal"]
    assert kinds["d 128 full"][0] == "42" and kinds["all"][0] == "213"
    assert kinds["d 128 full"][1:3] == [f"{(1.1**41 * 550 / 600) ** (1 / 42):.3f}", "0.917"]
    assert kinds["queries and keys of unlike number"] == [
        "12", f"{(1.1**11 * 0.88) ** (1 / 12):.3f}", "0.880", f"{(11 / 9) * 0.8 ** (1 / 12):.3f}", "0.978",
        f"{(55 / 52) * 0.8 ** (1 / 12):.3f}", "0.846",
    ]  # fmt: skip
    assert [line[:3] for line in missed.rows] == [
        ["d 128 full 4k x 512", "the fastest peer", "0.880"],
        ["d 128 full 4250", "the fastest peer", "0.917"],
        ["d 128 full 4k x 512", "the fastest deterministic peer", "0.978"],
        ["d 128 full 4k x 512", "unordered", "0.846"],
    ]
    grid = {line[0]: line[1:] for line in plain.rows}
    assert list(plain.header[1:]) == ["d 128 full", "d 128 causal", "d 64 full", "d 64 causal"]
    assert list(grid) == [f"{n:,}" for n in sorted({*lengths.LENGTHS, *lengths.DRAWN})]
    assert grid["4,250"] == ["**0.917** (1.222)", *["1.100 (1.222)"] * 3]
    assert len(others.rows) == 213 - 168
    line = next(line for line in others.rows if line[0] == "d 128 full 4k x 512")
    assert line == [
        "d 128 full 4k x 512",
        "440",
        "**520**",
        "400",
        "500",
        "450",
        "490",
        "**0.880**",
        "**0.978**",
    ]
    assert failed.rows == [["cudnn-", "1", "RuntimeError: no"]]
    for table in (summary, missed, plain, others, failed):
        assert all(len(line) == len(table.header) for line in table.rows)


def test_tables_of_lengths_without_peers():
    rows = other_lengths()
    summary, missed, plain, others, failed = tables.lengths(rows)
    assert summary.rows[-1] == ["all", "8", *[tables.NONE] * 4, "1.000", "1.000"]
    assert not missed.rows and not plain.rows and not failed.rows
    assert {tuple(line[-2:]) for line in others.rows} == {(tables.NONE, tables.NONE)}
    assert all(not table.rows for table in tables.lengths([]))


def test_the_chart_of_lengths_has_a_panel_a_mask_and_every_ratio():
    from benchmarks import charts

    record = record_of_lengths(**{PLAIN_CELL: {"fa3-": 600}})
    figure = charts.lengths(record["rows"])
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["d 128 full", "d 128 causal", "d 64 full", "d 64 causal"]
    drawn = {line.get_label(): line for line in panels["d 128 full"].lines}
    points = dict(zip(*drawn["over the fastest peer"].get_data(), strict=True))
    assert sorted(points) == sorted({*lengths.LENGTHS, *lengths.DRAWN})
    assert points[4250] == pytest.approx(550 / 600) and points[700] == pytest.approx(1.1)
    others = drawn["over the fastest deterministic peer, other heads"].get_xdata()
    grouped = [s.seqlen for s in lengths.GROUPED if s.head_dim == 128 and not s.causal]
    assert sorted(others) == sorted([*grouped, 32768, 65536])
    assert [title for title, _ in charts.length_panels(record["rows"])] == list(panels)
    assert charts.svg(figure) == charts.svg(charts.lengths(record["rows"]))
    # What has no ratio yet has a chart all the same.
    assert b"<svg" in charts.svg(charts.lengths([row("auto", 1.0, lengths.UNLIKE[0])]))


# Claims, documents, report.


def made_up(kinds=("backward", *MORE)):
    rows = {"backward": SWEEP, **MORE}
    return {
        kind: {"kind": kind, "form": "full", "environment": environment(), "rows": rows[kind]}
        for kind in kinds
    }


def answers(found):
    return {line[0]: line[2:] for line in claims.claims(found).rows}


def test_claims_are_answered_by_the_records():
    found = answers(made_up())
    assert found["Determinism costs FlashAttention-3 throughput"][0] == "no"  # 37.5 % of at most 37.9
    assert found["Speed over deterministic FlashAttention-3"][0] == "yes"
    assert found["The same over our own naive order, full mask"][0] == "no"
    assert found["The same over our own naive order, causal mask"][0] == "yes"
    assert found["Full mask: shift is the fastest everywhere"] == ["yes", "fastest in 1 of 1"]
    assert found["Full mask: shift dips at 16k"] == [tables.NONE, "not measured yet"]
    assert found["Causal, d 64: symmetric shift is the fastest"][0] == "yes"
    words = "over deterministic FA3: in 0 and 0 of 1"
    holds, numbers = found["Causal: descending and symmetric shift always beat the baseline"]
    assert holds == "no" and words in numbers
    assert found["Whole blocks gain, causal mask"] == [
        "yes", "+10.0 % over naive; +10.0 (M1, 4k) to +10.0 % (M1, 4k)",
    ]  # fmt: skip
    assert found["Whole blocks gain, full mask"][0] == "no"
    # Unordered is not counted, and neither are peers.
    assert found["Ten runs give the same bits"] == ["yes", "2 of 2 rows with the same bits"]


def test_a_claim_that_does_not_hold_is_told():
    rows = [
        *SWEEP,
        *(row(n, x, PAPER_SHAPES[1]) for n, x in (("naive", 400), ("descending", 380), ("shift", 392))),
    ]
    found = answers({"backward": {"rows": rows}})["Full mask: shift is the fastest everywhere"]
    assert found[0] == "in 1 of 2 cells" and "2.0 % behind the fastest at worst (d 128 full 1k)" in found[1]
    assert set(map(tuple, answers({}).values())) == {(tables.NONE, "not measured yet")}


def test_a_document_is_filled_between_its_marks():
    text = "Before\n<!-- measured: memory -->\nold\n<!-- /measured -->\nafter\n"
    once = publish.filled(text, made_up())
    assert "| c | 3.0 (1.5000) |" in once and "old" not in once and "a GPU, driver 1" in once
    assert once.startswith("Before\n<!-- measured: memory -->\n") and once.endswith(
        "<!-- /measured -->\nafter\n"
    )
    assert publish.filled(once, made_up()) == once
    assert "Not measured yet. `python -m benchmarks memory`" in publish.filled(text, {})
    with pytest.raises(ValueError, match="nothing is called 'nonsense'"):
        publish.filled(text.replace("memory", "nonsense"), {})


def test_the_committed_document_is_what_the_committed_records_say():
    text = publish.DOCUMENT.read_text()
    assert publish.filled(text, records.committed()) == text, "run python -m benchmarks publish"
    assert set(re.findall(r"<!-- measured: (\w+)", text)) == set(publish.PLACES)


def results_folder(tmp_path):
    for kind, record in made_up().items():
        harness.write_json(tmp_path / f"{kind}.json", record)
    for day, speed in ((1, 0.9), (3, 1.1)):
        rows = [row("auto", 180 * speed, CAUSAL)]
        record = night(rows, date=f"2026-01-0{day}T00:00:00+00:00")
        harness.write_json(tmp_path / "nightly" / f"2026010{day}.json", record)
    return tmp_path


def test_full_records_are_preferred_to_quick_ones(tmp_path):
    for name in ("memory", "memory_quick", "blocks_quick"):
        harness.write_json(tmp_path / f"{name}.json", {"name": name, "rows": []})
    found = {kind: record["name"] for kind, record in records.committed(tmp_path).items()}
    assert found == {"memory": "memory", "blocks": "blocks_quick"}


def test_history_is_in_the_order_of_dates(tmp_path):
    points = records.history(results_folder(tmp_path))
    assert [p["date"][:10] for p in points] == ["2026-01-01", "2026-01-02", "2026-01-03"]
    ratios = [p["ratios"]["d 64, causal"] for p in points]
    assert ratios == pytest.approx([0.9 * 180 / 700, 180 / 700, 1.1 * 180 / 700])


def test_the_report_needs_nothing_else(tmp_path):
    record = judged(night([row("auto", 300.0), row("shift", 390.0)], tests_failed=["tests/<script>"]))
    text = report.build(record, results_folder(tmp_path))
    assert "FAILED" in text and "25.0% slower" in text
    assert "<script" not in text and "tests/&lt;script&gt;" in text
    assert all(a.startswith("data:image/svg+xml;base64,") for a in re.findall(r'src="([^"]*)"', text))
    assert "http" not in text and "<link" not in text and "url(" not in text
    assert 'name="viewport"' in text and text.count("<img") == 2 + 1 + 1 + 1
    for kind, title in report.SECTIONS:
        assert f'<section id="{kind}"><h2>{html.escape(title)}</h2>' in text and f'href="#{kind}"' in text
    assert "Not measured yet: <code>python -m benchmarks small_jobs</code>" in text
    assert "--peers fa2 --out benchmarks/results/backward_fa2.json</code>" in text
    assert "3.0 (1.5000)" in text and "2026-01-03 00:00" in text


def test_the_report_says_of_which_commit_the_gpu_tests_are(tmp_path):
    results = results_folder(tmp_path)
    tests = {"passed": 7, "failed": 0, "skipped": 1, "environment": {"device": "X", "commit": "feedbeef" * 5}}
    harness.write_json(results / "gpu_tests.json", tests)
    line = re.search("GPU tests: 7 passed[^<]*", report.build(None, results))
    assert line and "commit feedbeeffeed" in line.group()


def test_a_report_without_matplotlib_has_its_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.charts", None)
    monkeypatch.delattr(sys.modules["benchmarks"], "charts", raising=False)
    text = report.build(None, results_folder(tmp_path))
    assert "Without matplotlib the report has no charts." in text and "<img" not in text
    assert "3.0 (1.5000)" in text


def test_publish_overwrites_nothing_where_it_has_nothing(tmp_path, capsys):
    document, page = tmp_path / "page.md", tmp_path / "report.html"
    text = "<!-- measured: memory -->\nmeasured\n<!-- /measured -->\n"
    document.write_text(text)
    empty = tmp_path / "source distribution"
    empty.mkdir()
    results = results_folder(tmp_path / "results")
    before = sorted(results.iterdir())
    missing = tmp_path / "missing"
    for folder, made_from, night_record, why in (
        (empty, document, None, "no records"),
        (missing, document, None, "no records"),
        (results, missing, None, "missing"),
        (results, document, missing, "missing"),
    ):
        arguments = ["--results", str(folder), "--document", str(made_from), "--report", str(page)]
        assert publish.main([*arguments, *(["--night", str(night_record)] if night_record else [])]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and why in error
    assert document.read_text() == text and not page.exists()
    assert sorted(results.iterdir()) == before and not list(empty.iterdir())


@pytest.mark.parametrize("form", ["full", "quick"])
def test_publish_shows_the_lengths(form, tmp_path):
    """The full form with a chart; the quick one without: it has a cell or two a line."""
    results, document = tmp_path / "results", tmp_path / "page.md"
    names = ("targets", "lengths")
    document.write_text("".join(f"<!-- measured: {name} -->\n<!-- /measured -->\n" for name in names))
    rows = record_of_lengths()["rows"] if form == "full" else other_lengths()
    harness.write_json(results / "lengths.json", part_record(rows) | {"form": form})
    arguments = ["--results", str(results), "--document", str(document), "--report", str(tmp_path / "r.html")]
    assert publish.main(arguments) == 0
    text, page = document.read_text(), (tmp_path / "r.html").read_text()
    assert "| unordered | 0.99 in every cell |" in text and "| all | " in text
    assert (results / "lengths.svg").exists() == (form == "full")
    assert ("![Every length](../benchmarks/results/lengths.svg)" in text) == (form == "full")
    assert page.count("<img") == (4 if form == "full" else 0)


def test_publish_writes_charts_document_and_report(tmp_path, capsys):
    results = results_folder(tmp_path / "results")
    document = tmp_path / "page.md"
    document.write_text("<!-- measured: claims -->\n<!-- /measured -->\n")
    page = tmp_path / "report.html"
    harness.write_json(tmp_path / "night.json", judged(night()))
    arguments = ["--results", str(results), "--document", str(document), "--report", str(page)]
    assert publish.main([*arguments, "--night", str(tmp_path / "night.json")]) == 0
    assert "| Ten runs give the same bits | yes | yes |" in document.read_text()
    assert "PASSED" in page.read_text()
    charts = {name: (results / f"{name}.svg").read_bytes() for name in ("backward", "blocks")}
    assert all(b"<svg" in content for content in charts.values()) and b"fa3+" in charts["backward"]
    assert publish.main(arguments) == 0
    assert {name: (results / f"{name}.svg").read_bytes() for name in charts} == charts
