"""The layout derived from a config against checkpoints that exist, and the accounts."""

import math
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from labkit.checkpoint import accounting, active_decode, active_prefill, layout, storage_of
from labkit.checkpoint.accounting import component_of, part_of, totals_by
from labkit.checkpoint.files import find_tensors
from labkit.checkpoint.layout import parameters
from labkit.checkpoint.report import accounting_text
from labkit.config import ModelConfig
from labkit.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
FLASH = ModelConfig.from_file(GOLDEN / "flash")


@pytest.mark.parametrize(("case", "draft"), [
    ("text", True), ("vision", False), ("released_layout", False),
])
def test_layout_is_the_tensor_set_of_a_checkpoint(case, draft):
    config = ModelConfig.from_file(GOLDEN / case)
    wanted = {
        s.name: (s.shape, s.dtype, s.bytes) for s in layout(config)
        if draft or not s.name.startswith("mtp.")
    }
    stored = {
        name: (t.shape, t.dtype, t.end - t.begin) for name, t in find_tensors(GOLDEN / case).items()
    }
    assert wanted == stored
    assert len(wanted) == {"text": 601, "vision": 184, "released_layout": 821}[case]


def test_the_released_totals_follow_from_the_released_config():
    rows = accounting(FLASH)
    assert rows.totals.tensors == len(rows) == 96_085
    assert rows.totals.bytes == sum(row.bytes for row in rows) == 510_286_023_000
    assert len({row.name for row in rows}) == 96_085
    assert FLASH == ModelConfig.preset("flash")


def test_a_layout_is_lazy():
    first = list(islice(layout(FLASH), 2))
    assert [(s.name, s.shape, s.dtype, s.bytes) for s in first] == [
        ("embed.weight", (129280, 5120), "BF16", 129280 * 5120 * 2),
        ("layers.0.attn.wq_a.weight", (1280, 5120), "F8_E4M3", 1280 * 5120),
    ]


def test_selected_shapes_of_the_release():
    rows = {s.name: (s.shape, s.dtype) for s in layout(FLASH)}
    assert rows["layers.0.attn.wq_a.scale"] == ((40, 160), "F8_E8M0")
    assert rows["layers.39.ffn.experts.383.w2.weight"] == ((5120, 1152), "I8")
    assert rows["layers.39.ffn.experts.383.w2.scale"] == ((5120, 72), "F8_E8M0")
    assert rows["layers.1.engram.embed.weight"] == ((384_006_168, 256), "F8_E4M3")
    assert rows["layers.1.engram.embed.scale"] == ((384_006_168, 8), "F8_E8M0")
    assert rows["layers.14.engram.wkv.weight"] == ((25600, 6144), "F8_E4M3")
    assert rows["mtp.0.main_proj.weight"] == ((5120, 15360), "F8_E4M3")
    assert rows["layers.0.hc_attn_fn"] == ((24, 20480), "F32")
    assert "layers.2.attn.compressor.wgate.weight" in rows
    assert "layers.20.attn.compressor.wgate.weight" not in rows
    assert "layers.24.attn.indexer.wq_b.weight" in rows
    assert "layers.24.attn.indexer.wk.weight" not in rows


def billions(count: int, digits: int) -> str:
    return f"{count / 1e9:.{digits}f}"


def test_parameters_by_part():
    parts = {name: totals.parameters for name, totals in totals_by(FLASH, part_of).items()}
    assert billions(parts["backbone"], 1) == "551.6"
    assert billions(parts["backbone"] + parts["engram projections"], 1) == "551.9"
    assert billions(parts["engram tables"], 2) == "196.61"
    assert billions(parts["draft"], 1) == "14.2"
    assert billions(parts["vision"], 2) == "0.49"
    assert billions(sum(parts.values()), 1) == "763.2"
    assert sum(parts.values()) == accounting(FLASH).totals.parameters


def test_active_parameters_per_token():
    decode, prefill = active_decode(FLASH), active_prefill(FLASH)
    assert billions(decode.counted, 2) == "15.78"
    assert billions(decode.counted + decode.not_counted["engram projections"], 1) == "16.1"
    assert billions(prefill.counted, 2) == "7.88"
    assert "without Engram projections" in decode.convention
    assert "compressor and index key of layer 20" in prefill.convention
    # the same decode figure, written out from the dimensions
    c, width = FLASH, FLASH.hidden_size
    attention = (
        width * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * c.num_attention_heads * c.head_dim
        + c.o_lora_rank * c.num_attention_heads * c.head_dim + c.o_groups * c.o_lora_rank * width
        + c.q_lora_rank + c.head_dim + c.num_attention_heads
    )
    expert = 3 * width * c.moe_intermediate_size
    moe = (c.num_experts_per_tok + 1) * expert + c.n_routed_experts * (width + 2)
    compressor = c.head_dim * width + c.head_dim
    query = c.index_n_heads * (c.index_head_dim * c.q_lora_rank + width)
    key = c.index_head_dim * (c.head_dim + 1)
    ratios = [c.compress_ratios[i] for i in c.kv_source_layer_ids]
    want = c.num_hidden_layers * (attention + moe + 2 * width) + width + c.vocab_size * width
    want += sum(compressor + (c.head_dim * width if r > 1 else 0) + key for r in ratios)
    want += len(c.index_source_layer_ids) * query
    assert decode.counted == want


def test_components_cover_every_part_once():
    for key in (part_of, component_of, storage_of):
        groups = totals_by(FLASH, key)
        assert sum(g.tensors for g in groups.values()) == 96_085
        assert sum(g.bytes for g in groups.values()) == 510_286_023_000
    assert component_of("layers.3.attn.indexer.wq_b.weight") == "indexer"
    assert component_of("mtp.2.markov_head.head.weight") == "draft heads"
    assert component_of("layers.3.ffn_norm.weight") == "norms"


def test_report_ends_with_the_totals():
    text = accounting_text(FLASH)
    assert text.endswith("\ntotal: 96,085 tensors, 510,286,023,000 bytes")
    assert "763.21 B" in text and "15.78 B" in text and "7.88 B" in text
    assert all(len(line) < 300 for line in text.splitlines())
    nano = ModelConfig.preset("nano")
    full = accounting_text(nano, full=True).splitlines()
    assert sum("\t" in line for line in full) == accounting(nano).totals.tensors
    assert full[0] == "embed.weight\tF32\t[512, 32]\t65536"


def test_accounts_need_no_torch():
    code = (
        "import sys; from labkit.config import ModelConfig; "
        "from labkit.checkpoint.report import accounting_text; "
        "accounting_text(ModelConfig.preset('nano')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_form_keeps_fp32_where_the_release_does():
    nano = ModelConfig.preset("nano")
    rows = {s.name: s.dtype for s in layout(nano, "plain", "bfloat16")}
    assert rows["layers.0.attn.attn_sink"] == rows["layers.0.hc_ffn_fn"] == "F32"
    assert rows["layers.0.ffn.gate.bias_vl"] == "F32"
    assert rows["layers.0.attn.wq_a.weight"] == rows["layers.0.ffn.gate.weight"] == "BF16"
    assert {s.dtype for s in layout(nano, "plain", "float64")} == {"F64"}
    assert len(rows) == len(list(parameters(nano)))


def test_storage_of_each_kind():
    for name, storage in {
        "layers.0.attn.wkv.weight": "fp8_tile", "layers.0.engram.wkv.weight": "fp8_tile",
        "layers.2.attn.compressor.wkv.weight": "bf16", "layers.2.attn.indexer.wk.weight": "bf16",
        "layers.2.attn.indexer.wq_b.weight": "fp8_tile", "mtp.0.main_proj.weight": "fp8_tile",
        "layers.0.ffn.shared_experts.w1.weight": "fp8_tile",
        "layers.0.ffn.experts.7.w1.weight": "fp4_row", "mtp.1.ffn.experts.0.w3.weight": "fp4_row",
        "layers.1.engram.embed.weight": "fp8_row", "embed.weight": "bf16", "head.weight": "bf16",
        "mtp.2.markov_head.embed.weight": "bf16", "layers.0.ffn.gate.weight": "bf16",
        "layers.0.ffn.gate.bias": "fp32", "layers.0.attn.attn_sink": "fp32",
        "layers.0.hc_attn_scale": "fp32", "layers.1.engram.k_weight": "bf16",
        "vision.blocks.0.attn.wo.weight": "bf16", "vision.blocks.0.attn.wo.bias": "bf16",
        "aligner.w1.bias": "bf16", "image_start": "bf16",
    }.items():
        assert storage_of(name) == storage, name


def test_sides_that_no_block_divides():
    odd = ModelConfig.preset("nano").replace(
        hidden_size=40, moe_intermediate_size=36, q_lora_rank=50, quantized=True)
    rows = {s.name: s.shape for s in layout(odd)}
    assert rows["layers.0.attn.wq_a.scale"] == (math.ceil(50 / 32), math.ceil(40 / 32))
    assert rows["layers.0.ffn.experts.0.w2.weight"] == (40, 18)
    assert rows["layers.0.ffn.experts.0.w2.scale"] == (40, 2)
    with pytest.raises(CheckpointError, match="37 columns: two E2M1 codes share a byte"):
        list(layout(odd.replace(moe_intermediate_size=37)))
    assert len(list(layout(odd.replace(moe_intermediate_size=37), "plain"))) == 601
