"""The demo, in small: that it trains, that it finds equal runs equal, and different ones different."""

import json

import pytest
import torch

from dash_flash_attn import demo, flash_attn_func

TINY = demo.Sizes(layers=1, heads=1, head_dim=64, batch=1, seqlen=300, steps=4)
CPU = torch.device("cpu")


def test_every_schedule_repeats_its_bits(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(demo, "ON_CPU", TINY)
    assert demo.main(["--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["attention"] for row in result["schedules"]] == list(demo.SCHEDULES)
    assert all(row["bitwise_equal"] for row in result["schedules"])
    assert result["contrast"]["attention"] == demo.DEFAULT_ATTENTION
    assert result["device"] == "the CPU" and result["sizes"]["steps"] == 4


def test_text_output(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(demo, "ON_CPU", TINY)
    assert demo.main(["--device", "cpu", "--schedule", "symmetric-shift", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "bitwise equal" in line]
    assert lines[0].split()[0] == "symmetric_shift" and "tokens/s" in lines[0]
    assert "2 steps" in text and demo.DEFAULT_ATTENTION in text


def test_a_difference_is_found(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """An attention whose gradient differs in a last bit from one call to the next."""
    calls = 0

    def wavering(schedule: str) -> demo.Attention:
        def attention(q, k, v):
            nonlocal calls
            calls += 1
            out = flash_attn_func(q, k, v, causal=True, deterministic=True, schedule=schedule)
            return out * (1 + 1e-6 * (calls > TINY.steps))

        return attention

    monkeypatch.setattr(demo, "ON_CPU", TINY)
    monkeypatch.setattr(demo, "scheduled", wavering)
    assert demo.main(["--device", "cpu", "--schedule", "shift"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_the_model_learns() -> None:
    sizes = demo.Sizes(layers=1, heads=1, head_dim=64, batch=4, seqlen=128, steps=30)
    losses = demo.train(demo.scheduled("shift"), sizes, CPU, "test").losses
    assert losses[-5:].mean() < losses[0] - 1.5


def test_both_attentions_compute_the_same() -> None:
    ours = demo.train(demo.scheduled("shift"), TINY, CPU, "test").losses
    default = demo.train(demo.default_attention, TINY, CPU, "test").losses
    torch.testing.assert_close(ours, default, rtol=1e-4, atol=1e-4)


def test_one_bit_counts() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    assert demo.differing(x, x.clone()) == 0
    assert demo.differing(x, torch.tensor([-0.0, 1.0, 2.0])) == 1
    assert demo.differing(x, x.nextafter(torch.tensor(torch.inf))) == 3


def test_shows_the_mean_of_the_last_losses(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    losses = torch.arange(30.0, 0.0, -1.0)
    run = demo.Run(losses, {}, {}, 1.0)
    monkeypatch.setattr(demo, "train", lambda *_: run)
    row = demo.compare("shift", demo.scheduled("shift"), TINY, CPU)
    assert (row["first_loss"], row["last_loss"], row["mean_last_loss"]) == (30.0, 1.0, 5.5)
    assert "loss 30.000 -> 5.500" in demo.verdict(row)
    assert "mean of the last 10." in demo.introduction(demo.ON_GPU, "a GPU")
    assert "mean of the last 4." in demo.introduction(TINY, "the CPU")


@pytest.mark.parametrize(
    "argv",
    [
        ["--schedule", "best"],
        ["--steps", "0"],
        *(["--device", name] for name in ("cuda", "cuda:1", "foo", "meta", "cuda:x", "")),
    ],
)
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        demo.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and argv[0] in error.splitlines()[-1]
    assert "Traceback" not in error
