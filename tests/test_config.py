"""Parsing, validation and what is derived from the released config."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest

from labkit.config import PRESETS, ModelConfig
from labkit.errors import ConfigError
from labkit.primes import engram_primes, engram_rows, is_prime

GOLDEN = Path(__file__).parent / "golden"
RAW = json.loads((GOLDEN / "flash" / "config.json").read_text())
FLASH = ModelConfig.from_dict(RAW)


def changed(**text):
    raw = copy.deepcopy(RAW)
    raw["text_config"].update(text)
    return raw


@pytest.mark.parametrize("case", [
    "text", "long", "no_candidates", "ratio4", "padded", "bf16", "released_layout", "vision",
    "flash",
])
def test_every_case_parses_and_writes_itself_back(case):
    config = ModelConfig.from_file(GOLDEN / case)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_roles_of_the_release():
    kinds = [role.kind for role in FLASH.roles]
    assert {k: kinds.count(k) for k in ("window", "full", "reindex", "reuse")} == {
        "window": 2, "full": 4, "reindex": 4, "reuse": 30,
    }
    assert [r.layer for r in FLASH.roles if r.kind == "full"] == [2, 8, 14, 20]
    assert [r.layer for r in FLASH.roles if r.kind == "reindex"] == [24, 28, 32, 36]
    assert [r.layer for r in FLASH.roles if r.engram] == [1, 14]
    assert [r.layer for r in FLASH.roles if r.publishes_candidates] == [20]
    # every later index source, never the publisher, never a reuse layer
    assert [r.layer for r in FLASH.roles if r.uses_candidates] == [24, 28, 32, 36]
    assert FLASH.encoder_layers == 20
    assert [FLASH.roles[i].kv_source for i in (0, 2, 7, 8, 19, 20, 39)] == [
        None, 2, 2, 8, 14, 20, 20,
    ]
    assert [FLASH.roles[i].index_source for i in (1, 3, 20, 23, 24, 27, 39)] == [
        None, 2, 20, 20, 24, 24, 36,
    ]
    assert [FLASH.roles[i].ratio for i in (1, 2, 19, 20, 39)] == [0, 2, 2, 1, 1]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_small_ones_have_every_mechanism(name):
    config = ModelConfig.preset(name)
    kinds = {role.kind for role in config.roles}
    assert kinds == {"window", "full", "reindex", "reuse"}
    assert {r.ratio for r in config.roles} >= {1, 2}
    assert any(r.uses_candidates for r in config.roles)
    assert len(config.engram_layer_ids) == 2 and config.hc_mult == 4


def test_both_spellings_of_yarn_and_of_the_engram_pad():
    scaling = dict(RAW["text_config"]["rope_scaling"])
    scaling["type"] = scaling.pop("rope_type")
    assert ModelConfig.from_dict(changed(rope_scaling=scaling)) == FLASH
    assert ModelConfig.from_dict(changed(rope_scaling=None)).rope_scaling.factor == 1
    raw = changed()
    raw["text_config"]["engram_pad_token_id"] = raw["text_config"].pop("engram_pad_id")
    assert ModelConfig.from_dict(raw) == FLASH
    written = FLASH.replace(engram_pad_id=3).to_dict()["text_config"]
    assert written["engram_pad_id"] == written["engram_pad_token_id"] == 3
    with pytest.raises(ConfigError, match="engram_pad_id is 2 and engram_pad_token_id is 3"):
        ModelConfig.from_dict(changed(engram_pad_token_id=3))


@pytest.mark.parametrize(("text", "said"), [
    ({"compress_ratios": [0] * 43}, "layer 2 has compress_ratios 0"),
    ({"compress_ratios": [0, 0] + [2] * 18}, "needs an entry for each of 40 layers"),
    ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 23}, "draft entries after the backbone"),
    ({"kv_source_layer_ids": [8, 14, 20]}, "compressed layer 2 has no Full layer before it"),
    ({"kv_source_layer_ids": [2, 8, 14, 20, 22]}, "must contain every KV source, but lacks"),
    ({"kv_source_layer_ids": [8, 2, 14, 20]}, "increasing and unique"),
    ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, "must lie in 0..39"),
    ({"candidate_source_layer_id": 24}, "must be a Full layer"),
    ({"candidate_source_layer_id": 14}, "later index source 20 has ratio 1, the pool has 2"),
    ({"compress_ratios": [0, 0] + [2] * 17 + [1] * 21 + [0] * 3}, "layer 19 has ratio 1 but"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2"),
    ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "only 'yarn' is known"),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "only 'yarn' is known"),
    ({"hidden_size": "5120"}, "hidden_size is '5120': must be an integer"),
    ({"hidden_size": 0}, "hidden_size is 0: must be at least 1"),
    ({"head_dim": 500}, "head_dim is 500"),
    ({"qk_rope_head_dim": 63}, "must be even"),
    ({"o_groups": 7}, "must divide num_attention_heads 64"),
    ({"num_experts_per_tok": 400}, "must not exceed n_routed_experts 384"),
    ({"engram_num_embeddings": [384006168, 384016683]}, "must be the sums of the hash primes"),
    ({"dspark_target_layer_ids": [37, 38, 40]}, "needs layers in 0..39"),
    ({"pad_token_id": 2, "vocab_size": 100}, "below vocab_size 100"),
    ({"hc_eps": True}, "hc_eps is True: must be a number"),
    ({"hc_eps": math.nan}, "hc_eps is nan: must be a finite number"),
    ({"routed_scaling_factor": math.inf}, "routed_scaling_factor is inf: must be a finite number"),
    ({"rope_theta": -math.inf}, "rope_theta is -inf: must be a finite number"),
    ({"swiglu_limit": 10**400}, "0: must be a finite number"),
    ({"engram_layer_ids": [], "engram_max_ngram_size": 1}, "engram_max_ngram_size is 1: must be"),
    ({"engram_layer_ids": [], "engram_max_ngram_size": 0}, "engram_max_ngram_size is 0: must be"),
    ({"rope_theta": 1.0}, "rope_theta is 1.0: must be greater than 1"),
    ({"compress_rope_theta": 1}, "compress_rope_theta is 1.0: must be greater than 1"),
    ({"compress_rope_theta": 0.5}, "compress_rope_theta is 0.5: must be greater than 1"),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling has type [\"['yarn']\"]: only 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "rope_type": {}}}, "only 'yarn' is known"),
    ({"rope_scaling": {"type": "yarn", "beta_slow": 0}}, "rope_scaling.beta_slow is 0.0: must be"),
    ({"rope_scaling": {"type": "yarn", "beta_fast": -1}}, "rope_scaling.beta_fast is -1.0: must"),
    ({"rope_scaling": {"type": "yarn", "beta_fast": 2, "beta_slow": 3}},
     "rope_scaling.beta_fast is 2.0: must be at least rope_scaling.beta_slow 3.0"),
    ({"rope_scaling": {"type": "yarn", "factor": math.nan}}, "rope_scaling.factor is nan: must"),
])
def test_refusals_name_field_value_and_rule(text, said):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(changed(**text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41_text", "deepseek_v410", None, ""])
def test_only_one_model_type_is_computed(kind):
    raw = changed()
    raw["model_type"] = kind
    with pytest.raises(ConfigError, match="labkit computes 'deepseek_v41' only"):
        ModelConfig.from_dict(raw)


def test_other_top_level_refusals(tmp_path):
    with pytest.raises(ConfigError, match="unknown preset 'huge': choose one of nano, mini, flash"):
        ModelConfig.preset("huge")
    with pytest.raises(ConfigError, match="no config.json at"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelConfig.from_file(tmp_path)
    with pytest.raises(ConfigError, match="must hold an object"):
        ModelConfig.from_dict([])
    raw = changed()
    del raw["text_config"]["head_dim"]
    with pytest.raises(ConfigError, match="text_config lacks head_dim"):
        ModelConfig.from_dict(raw)
    raw = changed()
    raw["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size is \[128, 128\]"):
        ModelConfig.from_dict(raw)
    raw = changed()
    raw["vision_config"]["max_wh_ratio"] = 4
    with pytest.raises(ConfigError, match="max_wh_ratio is 4"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(("vision", "said"), [
    ({"num_attention_heads": 0}, "vision_config.num_attention_heads is 0: must be at least 1"),
    ({"num_attention_heads": -4}, "vision_config.num_attention_heads is -4"),
    ({"num_hidden_layers": -1}, "vision_config.num_hidden_layers is -1: must be at least 0"),
    ({"patch_size": -14}, "vision_config.patch_size is -14"),
    ({"num_hidden_layers": 0, "max_image_tokens": -1}, "vision_config.max_image_tokens is -1"),
    ({"rope_theta": math.nan}, "vision_config.rope_theta is nan: must be a finite number"),
    ({"rope_theta": 1}, "vision_config.rope_theta is 1.0: must be greater than 1"),
])
def test_vision_numbers_that_cannot_be(vision, said):
    raw = changed()
    raw["vision_config"].update(vision)
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(raw)
    assert said in str(error.value)


@pytest.mark.parametrize("layers", [0, 32])
@pytest.mark.parametrize("id_", [129280, 10**9, -2])
def test_the_image_id_lies_in_the_vocabulary_with_and_without_vision(layers, id_):
    raw = changed()
    raw["vision_config"]["num_hidden_layers"] = layers
    raw["image_token_id"] = id_
    with pytest.raises(ConfigError, match=f"image_token_id is {id_}: must be an id below"):
        ModelConfig.from_dict(raw)
    raw["image_token_id"] = -1
    if layers:
        with pytest.raises(ConfigError, match="image_token_id is -1"):
            ModelConfig.from_dict(raw)
    else:
        assert ModelConfig.from_dict(raw).image_token_id == -1


def test_replace_refuses_what_is_not_finite():
    with pytest.raises(ConfigError, match="hc_eps is nan: must be a finite number"):
        FLASH.replace(hc_eps=math.nan)
    scaling = dataclasses.replace(FLASH.rope_scaling, beta_fast=math.inf)
    with pytest.raises(ConfigError, match="rope_scaling.beta_fast is inf"):
        FLASH.replace(rope_scaling=scaling)


def test_replace_validates_and_save_reads_back(tmp_path):
    with pytest.raises(ConfigError, match="index_topk is 0"):
        FLASH.replace(index_topk=0)
    small = FLASH.replace(index_topk=7)
    small.save(tmp_path)
    assert ModelConfig.from_file(tmp_path) == small
    assert ModelConfig.from_file(tmp_path / "config.json").index_topk == 7


def test_engram_rows_of_the_release_are_sums_of_distinct_primes():
    assert engram_rows(FLASH) == [384_006_168, 384_016_682]
    flat = [p for layer in engram_primes(FLASH) for p in layer]
    assert len(set(flat)) == len(flat) == 2 * FLASH.engram_tables
    assert all(is_prime(p) and p >= 16_000_000 for p in flat)


def test_primality_against_a_sieve():
    limit = 5000
    sieve = [True] * limit
    sieve[:2] = [False, False]
    for n in range(2, limit):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    assert [is_prime(n) for n in range(limit)] == sieve
    assert not is_prime(3_215_031_751)  # a strong pseudoprime to the bases 2, 3, 5 and 7
