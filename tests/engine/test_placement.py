"""Weights that are kept on disk give the coordinates of weights in memory, and are not all in memory at once."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine.coordinates import CoordinateMap
from engine.errors import ModelError
from engine.example import Example, collate
from engine.fit_curvature import fit_curvature
from engine.fit_projection import fit_projection
from engine.memory import estimate_fit, weight_bytes
from engine.model import LoadedModel, fingerprint_mismatch, load_model
from engine.modules import track
from engine.placement import device_of, kept_elsewhere, release_heap, tensors
from engine.readahead import ReadAhead, tensor_ranges
from engine.selection import select_coordinates
from engine.settings import FitSettings, ModelSettings
from engine.sketcher import Sketcher
from indexer.process import resident
from indexer.weights import weights_hash

LAYERS = 6
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, tied embeddings, saved with a tokenizer."""
    from tests.conftest import make_tokenizer

    folder = tmp_path_factory.mktemp("layers")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """load(): in memory; load(n): the last n layers on disk."""

    def made(on_disk: int = 0, **changes: Any) -> LoadedModel:
        if not on_disk:
            return load_model(ModelSettings(model=str(folder), device="cpu", **changes))
        place = tmp_path_factory.mktemp("spread")
        where = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        where |= {f"model.layers.{i}": "disk" if i >= LAYERS - on_disk else "cpu" for i in range(LAYERS)}
        (place / "map.json").write_text(json.dumps(where))
        return load_model(ModelSettings(model=str(folder), device="cpu", device_map=str(place / "map.json"), offload_folder=place / "weights", **changes))

    return made


def examples(n: int = 10) -> list[Example]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 20, n)
    return [Example(str(i), ids := rng.integers(1, 320, t), ids, np.arange(t) > 0, "") for i, t in enumerate(lengths)]


def coordinates(loaded: LoadedModel, folder: Path | None = None) -> tuple[CoordinateMap, dict[str, torch.Tensor]]:
    settings = FitSettings(fit_examples=10, batch_tokens=64)
    tracked = track(loaded).tracked
    rows = list(range(10))
    curvature = fit_curvature(loaded, tracked, examples(), rows, settings, checkpoint=folder)
    selected = select_coordinates(curvature, {"all": [m.name for m in tracked]}, {m.name: 64 for m in tracked})
    at = CoordinateMap.from_curvature(loaded, curvature, selected.positions)
    return at, at(collate(examples(), rows, loaded.pad_id, loaded.device))


@pytest.mark.parametrize("on_disk", [2, LAYERS])
def test_the_same_coordinates_from_disk(load: Load, on_disk: int, tmp_path: Path) -> None:
    here, there = load(), load(on_disk)
    assert there.kept_elsewhere and not here.kept_elsewhere and there.device == torch.device("cpu")
    assert fingerprint_mismatch(here.fingerprint, there.fingerprint) is None and weights_hash(here) == weights_hash(there)
    at, wanted = coordinates(here)
    _, found = coordinates(there, tmp_path)
    assert set(found) == set(wanted) and len(found) == 7 * LAYERS
    batch = collate(examples(), list(range(10)), there.pad_id)
    at.save(tmp_path / "map")
    again = CoordinateMap.load(tmp_path / "map", there)(batch)
    for name, z in wanted.items():
        scale = float(z.abs().max())
        assert float((again[name] - z).abs().max()) <= 1e-5 * scale, name
        # the fit gives the same energy; directions of its own may be signed otherwise
        assert float((found[name].abs() - z.abs()).abs().max()) <= 1e-3 * scale, name


def test_layers_are_in_memory_one_at_a_time(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alive, most = 0, 0
    read = OffloadedWeightsLoader.__getitem__

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(self: OffloadedWeightsLoader, key: str) -> torch.Tensor:
        nonlocal alive, most
        array = read(self, key).numpy().copy()
        weakref.finalize(array, gone)  # once nothing uses its memory any more, an autograd graph included
        alive, most = alive + 1, max(most, alive + 1)
        return torch.from_numpy(array)

    loaded = load(LAYERS)
    coordinates(load())[0].save(tmp_path)
    at = CoordinateMap.load(tmp_path, loaded)
    batch = collate(examples(), list(range(10)), loaded.pad_id)
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", counted)
    at.stream(batch, lambda *_: None)
    for _ in range(3):
        at.stream(batch, lambda *_: None)
    gc.collect()
    assert 9 <= most <= 2 * 9 and alive < 9  # a layer has nine tensors; what the last one leaves does not add up
    most = 0
    at.capture.loaded = replace(loaded, kept_elsewhere=False)  # what would be without layers run again
    at.stream(batch, lambda *_: None)
    assert most >= 7 * LAYERS


def test_the_plan_counts_what_is_in_memory(load: Load) -> None:
    here, there = load(), load(LAYERS)
    layer = sum(p.numel() for p in here.model.model.layers[0].parameters()) * 4
    rest = 320 * 32 * 4 + 32 * 4
    assert weight_bytes(there) == rest + layer and weight_bytes(here) == rest + LAYERS * layer
    assert estimate_fit(there, track(there).tracked, FitSettings(batch_tokens=64)).recompute


def test_a_module_computes_where_its_weights_are_brought_to(load: Load) -> None:
    loaded = load(LAYERS)
    layer = loaded.model.model.layers[0].mlp.up_proj
    assert layer.weight.is_meta and device_of(layer) == torch.device("cpu")
    assert device_of(nn.Linear(1, 1)) == torch.device("cpu") and device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert not kept_elsewhere(nn.Linear(1, 1, device="meta"))
    found = {name: t.clone() for name, t in tensors(loaded.model)}
    for name, t in load().model.state_dict().items():
        assert torch.equal(found[name], t), name
    assert layer.weight.is_meta  # and is let go again


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device_map": "here"}, "--device-map must be auto"),
        ({"max_memory": ["cpu=1GB"]}, "--max-memory says how to spread a model, so --device-map is needed too"),
        ({"device_map": "auto", "max_memory": ["1GB"]}, "--max-memory '1GB': write a device and a size"),
        ({"device_map": "auto", "max_memory": ["cpu=much"]}, "--max-memory 'cpu=much': write a device and a size"),
    ],
)
def test_mistakes_are_named(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_model(ModelSettings(model=str(folder), device="cpu", **changes))


def test_a_map_that_is_not_one_is_named(folder: Path, tmp_path: Path) -> None:
    for content, sentence in (("{", "not JSON"), ("[1]", "must be an object")):
        (tmp_path / "map.json").write_text(content)
        with pytest.raises(ModelError, match=sentence):
            load_model(ModelSettings(model=str(folder), device="cpu", device_map=str(tmp_path / "map.json")))


def test_sketches_and_queries_are_those_of_a_model_in_memory(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = load(), load(LAYERS)
    at, z = coordinates(here)
    z_fit = {name: np.asarray(v) for name, v in z.items()}
    for quantise in (False, True):
        projection = fit_projection(z_fit, {"all": list(z)}, 8, seed=0, quantise=quantise, **({"directions": 0.75} if quantise else {}))
        Sketcher(here, at, projection, batch_tokens=64).save(tmp_path / "sketch")
        wanted = Sketcher.load(tmp_path / "sketch", here, batch_tokens=64).query(examples())
        sketcher = Sketcher.load(tmp_path / "sketch", there, batch_tokens=64)
        read: list[str | None] = []
        assert sketcher.projection.ahead is not None and sketcher.coordinates.ahead is not None
        monkeypatch.setattr(sketcher.projection.ahead, "will_need", read.append)
        for cached in (10**9, 4 * 64 * len(z) * 4, 1):  # all batches together; a few examples; each batch alone
            monkeypatch.setattr("engine.sketcher.CACHED_BYTES", cached)
            read.clear()
            found = sketcher.query(examples())
            np.testing.assert_allclose(found.y, wanted.y, rtol=1e-4, atol=1e-5 * float(np.abs(wanted.y).max()))
            np.testing.assert_allclose(found.z_norm_sq, wanted.z_norm_sq, rtol=1e-4)
            np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-5)
            assert len(read) % len(z) == 0 and (len(read) == len(z)) == (cached == 10**9)  # P is read once where all coordinates are held


def test_reading_ahead_names_the_bytes_of_each_tensor(tmp_path: Path) -> None:
    stored = {"a/q_s": torch.arange(6.0).view(2, 3), "g//q_a": torch.arange(5.0), "b": torch.zeros(2, dtype=torch.float16)}
    save_file(stored, tmp_path / "x.safetensors")
    found = tensor_ranges(tmp_path / "x.safetensors", {"a": ("a/q_s", "g//q_a"), "b": ("b",)})
    content = (tmp_path / "x.safetensors").read_bytes()
    for (offset, length), key in zip(found["a"] + found["b"], stored, strict=True):
        assert content[offset : offset + length] == stored[key].numpy().tobytes()
    ahead = ReadAhead(tmp_path / "x.safetensors", found)
    for name in ("a", None, "unknown"):
        ahead.will_need(name)
    ahead.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_goes_back_to_the_system() -> None:
    def anonymous() -> int:
        return resident()["anonymous"]

    blocks = [bytearray(100_000) for _ in range(2000)]  # below the size that the allocator maps by itself
    keep = blocks[::50]  # so that the heap's top cannot be given back alone
    held = anonymous()
    del blocks
    release_heap()
    assert held - anonymous() > 150_000_000 and len(keep) == 40
