"""The released config.json, parsed and validated; everything else is derived from it.

Field names are those of the release (nested there: `text_config`, `vision_config`; flat here).
The layer schedule is not stored anywhere: `ModelConfig.roles` derives it, so nano, mini and
flash differ by numbers only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from labkit.errors import ConfigError

PRESETS = ("nano", "mini", "flash")
_PRESET_FOLDER = Path(__file__).parent / "presets"

Kind = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True)
class LayerRole:
    """What one backbone layer does in CSA2 (technical report: Full, Reindex, Reuse).

    kind            window (sliding window only), full, reindex or reuse
    ratio           compression ratio r of the cache that it reads; 0 for a window-only layer
    kv_source       layer whose compressed KV and index keys it reads; None for window-only
    index_source    layer whose selection it reads (itself for full and reindex)
    publishes_candidates, uses_candidates   the candidate pool of `candidate_source_layer_id`
    """

    layer: int
    kind: Kind
    ratio: int
    kv_source: int | None
    index_source: int | None
    publishes_candidates: bool = False
    uses_candidates: bool = False
    engram: bool = False


@dataclass(frozen=True)
class RopeScaling:
    """YaRN numbers; `original_max_position_embeddings` 0 switches YaRN off."""

    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class VisionConfig:
    num_hidden_layers: int = 0
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One frozen record of all numbers; see `from_dict` for the rules that it must keep."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 1
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = 1e-20
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = -1
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = -1
    dtype: str = "bfloat16"
    quantized: bool = False
    vision: VisionConfig = field(default_factory=VisionConfig)

    # ---------------------------------------------------------------- derived
    @property
    def engram_tables(self) -> int:
        """Rows fetched per token and Engram layer: (N-1) orders x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @functools.cached_property
    def roles(self) -> tuple[LayerRole, ...]:
        """One `LayerRole` per backbone layer, in order."""
        return derive_roles(self)

    @property
    def encoder_layers(self) -> int:
        """Layers before the last KV source: the causal encoder of the CED split."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    # ---------------------------------------------------------------- in and out
    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """`nano` (tests), `mini` (trained, in the repository) or `flash` (the release)."""
        if name not in PRESETS:
            raise ConfigError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls.from_file(_PRESET_FOLDER / f"{name}.json")

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read a config.json (or a folder that holds one)."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"no config.json at {path}: name a preset ({', '.join(PRESETS)}) or a folder "
                "that holds config.json, tokenizer.json and safetensors"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}): download it again") from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Parse the nested released form. ConfigError names the field, the value and the rule."""
        if not isinstance(raw, dict):
            raise ConfigError(f"config.json must hold an object, not {type(raw).__name__}")
        # Equality, never a prefix test: "deepseek_v4" is a prefix of "deepseek_v41".
        if raw.get("model_type") != "deepseek_v41":
            raise ConfigError(
                f"model_type is {raw.get('model_type')!r}: labkit computes 'deepseek_v41' only"
            )
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError("text_config is missing: this is not a DeepSeek-V4.1 config.json")
        _require_constants(text)
        known = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name in known:
            if name in ("rope_scaling", "vision", "quantized", "dtype"):
                continue
            source = raw if name.endswith("_token_id") and name in raw else text
            if name in source and source[name] is not None:
                values[name] = _typed(name, source[name], known[name].type)
        if "engram_pad_token_id" in text:  # the other spelling found in public configs
            other = _typed("engram_pad_token_id", text["engram_pad_token_id"], "int")
            if values.setdefault("engram_pad_id", other) != other:
                raise ConfigError(
                    f"engram_pad_id is {values['engram_pad_id']} and engram_pad_token_id is "
                    f"{other}: they name the same thing and must be equal"
                )
        missing = [
            f.name for f in known.values()
            if f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
            and f.name not in values
        ]
        if missing:
            raise ConfigError(f"text_config lacks {', '.join(missing)}")
        values["dtype"] = str(raw.get("dtype") or text.get("dtype") or "bfloat16")
        values["rope_scaling"] = _parse_rope_scaling(text.get("rope_scaling"))
        values["vision"] = _parse_vision(raw.get("vision_config"))
        values["quantized"] = _parse_quantization(raw.get("quantization_config"))
        config = cls(**values)
        config.validate()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The nested released form; `from_dict` of it gives an equal config."""
        top = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
        flat = dataclasses.asdict(self)
        flat = {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}
        vision, scaling = flat.pop("vision"), flat.pop("rope_scaling")
        quantized = flat.pop("quantized")
        # Both spellings: engines in circulation look for one or the other.
        scaling = {"type": "yarn", "rope_type": "yarn", **scaling}
        out: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            **{k: flat.pop(k) for k in top},
            "dtype": flat["dtype"],
        }
        if quantized:
            out["quantization_config"] = dict(_QUANTIZATION)
        out["text_config"] = {
            "model_type": "deepseek_v41_text", **flat, **_CONSTANTS, "rope_scaling": scaling,
            "engram_pad_token_id": self.engram_pad_id,  # both spellings here as well
            "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        }
        out["vision_config"] = vision
        return out

    def save(self, folder: str | Path) -> None:
        text = json.dumps(self.to_dict(), indent=1)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")

    def replace(self, **changes: Any) -> ModelConfig:
        """A validated copy with some fields changed."""
        config = dataclasses.replace(self, **changes)
        config.validate()
        return config

    def validate(self) -> None:
        """Refuse what the architecture does not allow (ConfigError)."""
        from labkit.config_rules import check

        check(self)


def derive_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """Walk the layers once, remembering the last KV source and the last selection."""
    roles = []
    kv_source = index_source = None
    pool_published = False
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        engram = layer in config.engram_layer_ids
        if ratio == 0:
            roles.append(LayerRole(layer, "window", 0, None, None, engram=engram))
            continue
        kind: Kind = "reuse"
        if layer in config.kv_source_layer_ids:
            kind, kv_source, index_source = "full", layer, layer
        elif layer in config.index_source_layer_ids:
            kind, index_source = "reindex", layer
        publishes = layer == config.candidate_source_layer_id
        # The pool restricts every later index source, never its publisher.
        uses = pool_published and kind in ("full", "reindex")
        roles.append(
            LayerRole(layer, kind, ratio, kv_source, index_source, publishes, uses, engram))
        pool_published = pool_published or publishes
    return tuple(roles)


_CONSTANTS = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}


def _require_constants(text: dict[str, Any]) -> None:
    for name, value in (*_CONSTANTS.items(), ("hidden_act", "silu"), ("attention_bias", False)):
        found = text.get(name, value)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            raise ConfigError(f"{name} is {found!r}: DeepSeek-V4.1 has {value!r}, nothing else")


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """Check a JSON value against the dataclass annotation (a string such as 'int')."""
    annotation = str(annotation)

    def integer(v: Any) -> int:
        if isinstance(v, bool) or not isinstance(v, int):
            raise ConfigError(f"{name} is {v!r}: must be an integer")
        return v

    if annotation == "int":
        return integer(value)
    if annotation == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} is {value!r}: must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{name} is {value!r}: must be a finite number")
        return number
    if annotation == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: must be true or false")
        return value
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} is {value!r}: must be a list of integers")
    return tuple(integer(v) for v in value)


def _parse_rope_scaling(raw: Any) -> RopeScaling:
    if raw is None:
        return RopeScaling()
    if not isinstance(raw, dict):
        raise ConfigError(f"rope_scaling is {raw!r}: must be an object or null")
    kinds = [raw[k] for k in ("type", "rope_type") if k in raw]
    if not kinds or any(kind != "yarn" for kind in kinds):
        raise ConfigError(f"rope_scaling has type {sorted(map(str, kinds))}: only 'yarn' is known")
    values: dict[str, Any] = {}
    for name in ("factor", "beta_fast", "beta_slow"):
        if name in raw:
            values[name] = _typed(f"rope_scaling.{name}", raw[name], "float")
    name = "original_max_position_embeddings"
    if name in raw:
        values[name] = _typed(f"rope_scaling.{name}", raw[name], "int")
    return RopeScaling(**values)


def _parse_vision(raw: Any) -> VisionConfig:
    if raw is None:
        return VisionConfig()
    if not isinstance(raw, dict):
        raise ConfigError(f"vision_config is {raw!r}: must be an object or null")
    if raw.get("max_wh_ratio") is not None:
        raise ConfigError(f"max_wh_ratio is {raw['max_wh_ratio']!r}: the release has null")
    values = {}
    for f in dataclasses.fields(VisionConfig):
        if f.name != "max_wh_ratio" and f.name in raw:
            values[f.name] = _typed(f"vision_config.{f.name}", raw[f.name], f.type)
    return VisionConfig(**values)


def _parse_quantization(raw: Any) -> bool:
    if raw is None:
        return False
    if not isinstance(raw, dict):
        raise ConfigError(f"quantization_config is {raw!r}: must be an object or null")
    for name in ("quant_method", "scale_fmt", "weight_block_size"):
        if raw.get(name) != _QUANTIZATION[name]:
            raise ConfigError(
                f"quantization_config.{name} is {raw.get(name)!r}: the released layout has "
                f"{_QUANTIZATION[name]!r}"
            )
    return True
