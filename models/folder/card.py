"""The model card of an exported folder: what is known of the model, and how to load it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from models.budget import Budget, FixedBudget, PowerLawBudget
from models.config import KVMConfig, LayerConfig, ModelConfig
from models.folder.config import OWN_TOKENIZER

_KIND_NAMES = {
    "kvm": "Key-Value Means",
    "rwkv7": "RWKV-7",
    "sliding_window": "sliding-window attention",
    "block_window": "block-sliding-window attention",
    "full_attention": "full attention",
    "ovq": "online vector quantisation",
    "gated_deltanet": "Gated DeltaNet",
    "kda": "Kimi Delta Attention",
    "mamba2": "Mamba-2",
    "deltanet": "DeltaNet",
    "gla": "Gated Linear Attention",
}
_SHOWN_CONTEXTS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True)
class CardFacts:
    """What a run knows of the model besides its architecture: names -> values, as shown."""

    name: str
    origin: str
    training: dict[str, str] = field(default_factory=dict)
    evaluations: dict[str, str] = field(default_factory=dict)


def model_card(
    model: ModelConfig, parameters: int, dtype: str, tokenizer: str | None, facts: CardFacts
) -> str:
    """Markdown with the YAML head that the Hub reads; the licence is left for the user to state."""
    sections = [
        _head(model),
        f"# {facts.name}\n\n{_summary(parameters, dtype, facts)}",
        f"## Use\n\n{_use(tokenizer)}",
        f"## Layers\n\n{_table(('layers', 'kind', 'settings'), _layers(model))}",
        f"## Sizes\n\n{_table(('', ''), _sizes(model))}",
    ]
    if budget := _kvm_budget(model):
        sections.append(budget)
    if facts.training:
        sections.append(f"## Training\n\n{_table(('', ''), facts.training.items())}")
    if facts.evaluations:
        sections.append(f"## Evaluations\n\n{_table(('task', 'value'), facts.evaluations.items())}")
    sections.append(
        "## Licence\n\nNone is stated: add `license: NAME` to the head of this file, and a LICENSE file, "
        "before you pass the model on."
    )
    return "\n\n".join(sections) + "\n"


def _head(model: ModelConfig) -> str:
    tags = ["kvm-dist", *sorted({kind.replace("_", "-") for kind in model.layer_kinds})]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _summary(parameters: int, dtype: str, facts: CardFacts) -> str:
    return (
        f"A causal language model with {parameters:,} parameters in {dtype}, from {facts.origin}. Its folder "
        "was written by kvm-dist, which is needed to run it."
    )


def _use(tokenizer: str | None) -> str:
    lines = [
        "import models.hf  # of kvm-dist: registers the architecture",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
    ]
    if tokenizer is None:
        lines += ["input_ids = ...  # this folder has no tokenizer: the ids of the one used in training"]
        notes = "The folder has no tokenizer."
    else:
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("PATH")',
            'input_ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
        ]
        notes = _tokenizer_note(tokenizer)
    lines += ["out = model.generate(input_ids, max_new_tokens=64)"]
    if tokenizer is not None:
        lines += ["print(tokenizer.decode(out[0]))"]
    code = "\n".join(lines)
    return f"```python\n{code}\n```\n\n{notes} On the command line: `kvm-dist sample PATH --prompt TEXT`."


def _tokenizer_note(tokenizer: str) -> str:
    if tokenizer == "rwkv-world":
        return (
            "The tokenizer is the RWKV world vocabulary, whose class is part of kvm-dist: without "
            "`import models.hf` it does not load."
        )
    if tokenizer == OWN_TOKENIZER:
        return "The tokenizer's files lie in this folder."
    return "Tokens are bytes, and id 0 ends a text; the tokenizer loads without kvm-dist."


def _layers(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """A row for each kind: where it stands, its name and its settings."""
    first = 0
    rows: dict[str, list[str]] = {}
    for kind, group in groupby(model.layer_kinds):
        count = len(list(group))
        rows.setdefault(kind, []).append(str(first) if count == 1 else f"{first}-{first + count - 1}")
        first += count
    for kind, places in rows.items():
        config = model.layer_config(kind)
        yield ", ".join(_shortened(places)), f"{_KIND_NAMES.get(kind, kind)} | {_settings(config)}"


def _shortened(places: list[str]) -> list[str]:
    """Of many single layers at equal distances the first two and the last."""
    if len(places) <= 4 or not all(place.isdigit() for place in places):
        return places
    numbers = [int(place) for place in places]
    even = numbers == list(range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0]))
    return [*places[:2], "...", places[-1]] if even else places


def _settings(config: LayerConfig) -> str:
    values = config.model_dump(mode="json", exclude={"backend", "budget"})
    return ", ".join(
        _setting(name.replace("_", " "), value) for name, value in values.items() if value is not None
    )


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def _sizes(model: ModelConfig) -> list[tuple[str, str]]:
    return [
        ("vocabulary", f"{model.vocab_size:,}"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("layers", str(model.num_layers)),
        ("attention heads", f"{model.num_heads} of width {model.head_width}"),
        ("feed-forward width", f"{model.ffn_width:,}"),
        ("residual scale", f"{model.depth_scale:g}"),
    ]


def _kvm_budget(model: ModelConfig) -> str:
    config = model.used_layer_configs.get("kvm")
    if not isinstance(config, KVMConfig):
        return ""
    slots = [(f"{tokens:,}", f"{config.slots_after(tokens):,}") for tokens in _SHOWN_CONTEXTS]
    return (
        f"## State of the Key-Value Means layers\n\n{_budget(config.budget)}, a window of "
        f"{config.window_chunks * config.chunk} tokens besides. Another budget can be given without training "
        "again: `model.kvm.budget` in config.json.\n\n" + _table(("tokens read", "slots"), slots)
    )


def _budget(budget: Budget) -> str:
    if isinstance(budget, FixedBudget):
        return f"{budget.slots} slots, whatever the length"
    if isinstance(budget, PowerLawBudget):
        return f"{budget.factor:g} x N^{budget.exponent:g} slots after N tokens, at least {budget.minimum}"
    return f"{budget.limit} x N / ({budget.limit} + N) slots after N tokens, at least {budget.minimum}"


def _table(head: tuple[str, ...], rows: object) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]  # type: ignore[attr-defined]
    return "\n".join(lines)
