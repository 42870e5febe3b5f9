"""The backbone as a transformers model, registered with AutoConfig and AutoModelForCausalLM."""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from models.backbone import Backbone
from models.head import Head
from models.hf.cache import KVMDistCache
from models.hf.configuration import KVMDistConfig
from models.hf.generation import CACHE_KEY, CachedGeneration, require_cache
from models.hf.rows import RowGroup, read_rows, split_by_tokens
from models.initialise import initialise
from models.loss import IGNORED_LABEL, token_losses
from parallel.sequence.context import WholeSequence


class KVMDistForCausalLM(CachedGeneration, PreTrainedModel, GenerationMixin):
    """Any backbone of this package; weights are called `backbone.NAME`.

    A batch may be padded anywhere: rows are read without the positions that `attention_mask` hides.
    """

    config_class = KVMDistConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def __init__(self, config: KVMDistConfig) -> None:
        super().__init__(config)
        self.backbone = Backbone(config.model_config)
        self.gradient_checkpointing = self.backbone.config.activation_checkpointing
        if not self.backbone.head.weight.is_meta:
            initialise(self.backbone, seed=int(torch.randint(2**31, ())))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVMDistCache | None = None,
        past_key_values: KVMDistCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids [B, T] -> logits [B, T, V], of the columns that `logits_to_keep` asks for.

        attention_mask: [B, T], or [B, earlier columns + T]; 0 where a row holds no token. Logits there are
        those of the last token before. cache (formerly past_key_values): what earlier calls returned; it then
        holds these tokens too. labels: input_ids, or -100 where nothing is to be learnt; the shift happens
        here. The loss is their mean, or their sum over num_items_in_batch. use_cache: None means in
        evaluation only, if the configuration says so.
        """
        ids = _require_ids(input_ids, unsupported)
        known = require_cache(cache, past_key_values)
        if use_cache is None and known is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        if use_cache and known is None:
            known = KVMDistCache()
        present = _present(attention_mask, ids, known)
        if labels is not None:
            _require_whole(labels, ids, known, logits_to_keep)
        features = self._read(ids, present, known)
        logits = self.backbone.head(_kept(features, logits_to_keep))
        loss = None
        if labels is not None:
            total, valid = token_losses(logits[:, :-1], _next_labels(labels, present))
            loss = total / (valid if num_items_in_batch is None else num_items_in_batch)
        kept = {} if use_cache is False else {CACHE_KEY: known}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **kept)
        whole = self.config.return_dict if return_dict is None else return_dict
        return output if whole else output.to_tuple()

    def _read(self, ids: Tensor, present: Tensor | None, cache: KVMDistCache | None) -> Tensor:
        batch, columns = ids.shape
        tokens = [columns] * batch if present is None else present.sum(dim=1).tolist()
        if cache is None:
            groups = split_by_tokens([RowGroup(list(range(batch)), WholeSequence())], tokens)
            return read_rows(self.backbone, ids, present, groups)
        features = read_rows(self.backbone, ids, present, cache.groups_for(tokens))
        cache.advance(columns)
        return features

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the constructor fills the backbone, and `from_pretrained` accepts no missing weight."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Called when activation checkpointing is turned on or off: every n-th layer does its own."""
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.backbone.layers):
            for module in block.modules():
                if hasattr(module, "recompute"):
                    module.recompute = enable and index % every_n_layers == 0  # type: ignore[assignment]

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **named: Any) -> Any:
        """See PreTrainedModel. ValueError if weights are missing, unknown or of another shape.

        OSError if a file of them is missing or damaged.
        """
        named["ignore_mismatched_sizes"] = True  # found below, with their names and shapes
        try:
            model, found = super().from_pretrained(*arguments, output_loading_info=True, **named)
        except SafetensorError as error:
            raise OSError(
                f"{', '.join(map(str, arguments[:1]))}: a safetensors file is damaged or cut off ({error}); "
                "copy the folder again"
            ) from error
        problems = [f"{name}: {sorted(keys)}" for name, keys in found.items() if keys]
        if problems:
            raise ValueError(
                f"the weights do not fit the configuration: {'; '.join(problems)}; export the model again, "
                "or mend `model` in its config.json"
            )
        return (model, found) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.backbone.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """The weight alone is taken over: the backbone's head knows losses too."""
        with torch.device("meta"):
            self.backbone.head = Head(new_embeddings.in_features, new_embeddings.out_features)
        self.backbone.head.weight = new_embeddings.weight

    def resize_token_embeddings(self, *arguments: Any, **named: Any) -> nn.Embedding:
        """See PreTrainedModel; the vocabulary under `config.model` follows."""
        embedding: nn.Embedding = super().resize_token_embeddings(*arguments, **named)
        self.config.vocab_size = embedding.num_embeddings
        self.config.model = {**self.config.model, "vocab_size": embedding.num_embeddings}
        self.backbone.config = self.config.model_config
        return embedding


def _require_ids(input_ids: Tensor | None, unsupported: dict[str, Any]) -> Tensor:
    given = sorted(name for name, value in unsupported.items() if value is not None and value is not False)
    if given:
        raise ValueError(
            f"{', '.join(given)}: not supported; pass input_ids with attention_mask, from which positions "
            "follow, labels and a cache"
        )
    if input_ids is None or input_ids.ndim != 2 or input_ids.numel() == 0:
        shape = None if input_ids is None else list(input_ids.shape)
        raise ValueError(f"input_ids: got {shape}, wanted at least one row of at least one token")
    return input_ids


def _present(mask: Tensor | None, ids: Tensor, cache: KVMDistCache | None) -> Tensor | None:
    """Which of ids [B, T] are tokens, bool [B, T]; None if all are."""
    if mask is None:
        return None
    batch, columns = ids.shape
    whole = columns + (0 if cache is None else cache.get_seq_length())
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (columns, whole):
        raise ValueError(
            f"attention_mask: got {list(mask.shape)}, wanted [{batch}, {columns}], or [{batch}, {whole}] "
            "with the columns that the cache has read"
        )
    present = mask[:, -columns:].to(ids.device) != 0
    return None if bool(present.all()) else present


def _require_whole(
    labels: Tensor, ids: Tensor, cache: KVMDistCache | None, logits_to_keep: int | Tensor
) -> None:
    if labels.shape != ids.shape:
        raise ValueError(f"labels: got {list(labels.shape)}, wanted the shape of input_ids {list(ids.shape)}")
    goes_on = cache is not None and cache.get_seq_length() > 0
    if goes_on or not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError(
            "labels need the whole sequence: leave out logits_to_keep and the cache of earlier calls"
        )


def _kept(features: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last columns of features [B, T, d], 0 for all, or those whose numbers are given."""
    columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return features[:, columns]


def _next_labels(labels: Tensor, present: Tensor | None) -> Tensor:
    """labels [B, T] -> what each column but the last has to predict, [B, T - 1]: a token after a token."""
    following = labels[:, 1:]
    if present is None:
        return following
    pair = present[:, 1:] & (present.cumsum(dim=1)[:, :-1] > 0)
    return following.masked_fill(~pair, IGNORED_LABEL)


AutoConfig.register(KVMDistConfig.model_type, KVMDistConfig, exist_ok=True)
AutoModelForCausalLM.register(KVMDistConfig, KVMDistForCausalLM, exist_ok=True)
