"""The peers' table: what it counts, and that a kept measurement is not made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peers
import peers_common as common
import pytest
import torch


def row(fixed: float, each: float, **more: Any) -> dict[str, Any]:
    return {"index": {"seconds": {"cpu": fixed}}, "queries": {str(n): {"cpu": each * n} for n in common.COUNTS}, **more}


@pytest.mark.parametrize(("ours", "theirs"), [((100, 0.01), (20, 0.5)), ((5, 0.01), (20, 0.5)), ((100.056, 0.1), (20, 0.11)), ((100, 0.1), (99.95, 0.1))])
def test_overtaking_is_the_first_number_of_queries_that_is_cheaper_in_all(ours: tuple[float, float], theirs: tuple[float, float]) -> None:
    found = peers.overtakes(row(*ours), row(*theirs))
    wanted = next((n for n in range(1, 20_000) if ours[0] + ours[1] * n <= theirs[0] + theirs[1] * n), None)
    assert found == wanted


def test_goals_are_ratios_of_the_rows() -> None:
    figures = {"lds": [0.3, 0.2, 0.4], "ndcg": 0.5, "spearman": 0.6}
    ours, kron = row(10, 0.01, key="ours-256", quality={"": figures}), row(5, 0.5, key="kronfluence", quality={"": figures})
    worse, better = {**figures, "lds": [0.2, 0, 1]}, {**figures, "lds": [0.25, 0, 1]}
    bergson = row(5, 0.1, key="bergson", quality={", dot": worse, ", one-sided": better})
    ours["index"]["bytes_per_example"], bergson["index"]["bytes_per_example"] = 256, 16384
    found = peers.goals([ours, kron, bergson])["ours-256"]
    assert found["times faster than kronfluence, 1,000 queries"] == pytest.approx(50)
    assert found["share of bergson's bytes per example"] == 1 / 64
    assert found["LDS minus bergson's best"] == pytest.approx(0.05)


def test_kept_measurements_are_not_made_again(tmp_path: Path) -> None:
    peer = peers.Peer("one", "One", "no-such-worker.py")
    kept = tmp_path / "peers" / "one" / "index.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"seconds": 3}))
    assert peers.worker(peer, "index", tmp_path, Path("no-such-python"))["seconds"] == 3
    with pytest.raises(FileNotFoundError):
        peers.worker(peer, "scores", tmp_path, Path("no-such-python"))


def test_batches_hold_every_text_once_and_the_loss_every_target() -> None:
    ids = [torch.arange(1, n) for n in (4, 9, 3, 7, 5)]
    order = [i for chosen in common.by_length(ids, 2) for i in chosen]
    assert sorted(order) == [0, 1, 2, 3, 4]
    batch, mask = common.padded(ids)
    logits = torch.randn(5, batch.shape[1], 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    naive = -sum(torch.log_softmax(logits[b, t - 1], 0)[x[t]].item() for b, x in enumerate(ids) for t in range(1, len(x)))
    assert common.summed_loss(logits, batch, mask).item() == pytest.approx(naive, rel=1e-12)
