"""docs/architecture.md against the code: its table of keys names every tensor, and rightly."""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from labkit.checkpoint import layout, storage_of
from labkit.config import ModelConfig
from labkit.kernels import reference
from labkit.model import hyper
from labkit.model.transformer import Transformer

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
# key, code, symbol, shape, storage
ROWS = re.findall(
    r"^\| `([\w.{}]+)` \| (planned|`[\w.]+`) \| ([^|]+) \| \[([^|]*)\] \| ([^|]+) \|",
    TEXT, re.MULTILINE,
)
STORAGE = {"fp8_tile": "fp8 tile", "fp8_row": "fp8 row", "fp4_row": "fp4 row"}


def plain(name: str) -> str:
    """'layers.12.ffn.experts.3.w1.weight' -> 'layers.{i}.ffn.experts.{e}.w1.weight'."""
    name = re.sub(r"^layers\.\d+", "layers.{i}", name)
    # A stage of the draft is a block; what only stages hold has rows of its own.
    own = r"\.(main_|norm\.|markov_head|confidence_head)"
    name = re.sub(r"^mtp\.\d+(?=" + own + ")", "mtp.{s}", name)
    name = re.sub(r"^mtp\.\d+", "layers.{i}", name)
    name = re.sub(r"^vision\.blocks\.\d+", "vision.blocks.{b}", name)
    return re.sub(r"\.experts\.\d+", ".experts.{e}", name)


def test_every_tensor_of_the_release_has_one_row():
    keys = [row[0] for row in ROWS]
    assert len(set(keys)) == len(keys)
    names = [spec.name for spec in layout(ModelConfig.preset("flash"), "plain")]
    assert {plain(name) for name in names} == set(keys)


def test_storage_is_the_layout_s():
    told = {row[0]: row[4].strip() for row in ROWS}
    for spec in layout(ModelConfig.preset("flash"), "plain"):
        kind = storage_of(spec.name)
        assert told[plain(spec.name)] == STORAGE.get(kind, kind), spec.name


@pytest.fixture(scope="module")
def model():
    config = ModelConfig.preset("nano")
    classes = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    return Transformer(config, engram_classes=classes, draft=True)


def test_code_column_names_the_class_and_attribute_that_hold_the_tensor(model):
    told = {row[0]: row[1].strip("`") for row in ROWS}
    seen = set()
    for name, _ in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        owner = model.get_submodule(".".join(path[:-1]))
        key = plain(name)
        if key.endswith("gate.weight") and "ffn" in key:  # the gate holds its weight itself
            owner, path = model.get_submodule(name.removesuffix(".weight")), ["weight"]
        # A stage of the draft is a Block, its attention an Attention.
        owners = {f"{kind.__name__}.{path[-1]}" for kind in type(owner).__mro__}
        assert told[key] in owners, name
        seen.add(key)
    # and what the table calls planned is what the model does not hold yet
    assert {key for key, code in told.items() if code != "planned"} == seen


def test_symbol_column_names_variables_of_the_code(model):
    """A symbol is a name in the file of the class, or in one that its formula stands in."""
    modules = {type(m).__name__: sys.modules[type(m).__module__] for m in model.modules()}
    formulas = {"hc_": hyper, "attn_sink": reference}
    for key, code, symbol, *_ in ROWS:
        if code == "planned":
            assert symbol == "–", key
            continue
        owner, attribute = code.strip("`").split(".")
        module = next((m for k, m in formulas.items() if attribute.startswith(k)), modules[owner])
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.arg for node in nodes if isinstance(node, ast.arg | ast.keyword)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        symbols = re.findall(r"`(\w+)`", symbol)
        assert symbols and set(symbols) <= names, key


def test_shapes_in_symbols_are_the_model_s(model):
    c = model.config
    symbols = {
        "V": c.vocab_size, "D": c.hidden_size, "C": c.hc_mult, "H": c.num_attention_heads,
        "d": c.head_dim, "G": c.o_groups, "Hi": c.index_n_heads, "di": c.index_head_dim,
        "E": c.n_routed_experts, "F": c.moe_intermediate_size, "N": c.engram_max_ngram_size,
        "heads": c.engram_n_heads, "q_lora_rank": c.q_lora_rank, "o_lora_rank": c.o_lora_rank,
        "engram_head_dim": c.engram_head_dim, "rank": c.dspark_markov_rank,
        "targets": len(c.dspark_target_layer_ids),
    }  # fmt: skip
    shapes = {row[0]: row[3] for row in ROWS}
    for name, parameter in model.named_parameters():
        values = dict(symbols)
        if "engram" in name:
            values["rows"] = parameter.shape[0]  # a sum of primes, checked with the addresses
        if name.startswith("mtp."):
            values["E"] = c.dspark_n_routed_experts
        formula = shapes[plain(name)].replace("·", "*").replace("C(", "C*(")
        expected = [eval(part, {}, values) for part in formula.split(", ")]
        assert list(parameter.shape) == expected, name
