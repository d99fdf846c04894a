"""The model `hetero_kv` of lm_eval: a thin shell around `HarnessModel`. Only here lm_eval is imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.evals.lm_eval_adapter.harness_model import HarnessModel
from hetero_kv.evals.lm_eval_adapter.model_arguments import ModelArguments, device_of

#: The model's name: `lm_eval --model hetero_kv`.
NAME = "hetero_kv"


def register() -> None:
    """Make the model `hetero_kv` known to lm_eval in this process. Further calls do nothing.

    Raises ConfigError if lm_eval is not installed.
    """
    made = lm_class()
    # lm_eval lists its own models on first use, but only where none is registered yet.
    importlib.import_module("lm_eval.models")
    from lm_eval.api.registry import register_model

    register_model(NAME)(made)


@functools.cache
def lm_class() -> type:
    """The class of the model: a subclass of `lm_eval.api.model.LM`.

    Raises ConfigError if lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.utils import simple_parse_args_string
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ConfigError(f"lm_eval cannot be imported ({error}); install it: pip install lm-eval") from error

    class HeteroKVLM(LM):
        """lm_eval's view of a model under rules. Arguments: `ModelArguments`, in addition to lm_eval's own three.

        Args:
            batch_size, max_batch_size, device: lm_eval's flags of these names; None if they are not given.
            arguments: `model_args`.
        """

        def __init__(
            self,
            batch_size: int | str | None = None,
            max_batch_size: int | None = None,
            device: str | None = None,
            **arguments: Any,
        ) -> None:
            super().__init__()
            parsed = ModelArguments.parsed({**arguments, "device": device}, batch_size, max_batch_size)
            self.harness_model = HarnessModel.load(parsed)
            self._device = self.harness_model.loaded.model.device

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
        ) -> HeteroKVLM:
            """See LM. Raises ConfigError if `model_args` and the flag `--device` name different devices."""
            flags = dict(additional_config or {})
            flags["device"] = device_of(arg_dict.get("device"), flags.get("device"))
            return cls(**{**arg_dict, **flags})

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HeteroKVLM:
            """See LM; as `create_from_arg_obj`."""
            return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """See LM."""
            found = self.harness_model.loglikelihoods(request.args for request in requests)
            return self._collected("loglikelihood", requests, (tuple(each) for each in found), disable_tqdm)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """See LM."""
            found = self.harness_model.rolling_loglikelihoods(request.args[0] for request in requests)
            return self._collected("loglikelihood_rolling", requests, found, disable_tqdm)

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """See LM."""
            found = self.harness_model.answers(request.args for request in requests)
            return self._collected("generate_until", requests, found, disable_tqdm)

        def _collected(self, kind: str, requests: Sequence[Any], found: Iterable[Any], quiet: bool) -> list[Any]:
            """The results, each in lm_eval's cache of answers (`--use_cache`) as soon as it is there."""
            results = []
            for request, result in zip(requests, self._shown(kind, len(requests), found, quiet), strict=True):
                self.cache_hook.add_partial(kind, request.args, result)
                results.append(result)
            return results

        @staticmethod
        def _shown(kind: str, number: int, found: Iterable[Any], quiet: bool) -> Iterator[Any]:
            yield from tqdm(found, total=number, disable=quiet, desc=f"Running {kind} requests")

        def apply_chat_template(
            self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """See LM."""
            return self.harness_model.chat_text(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:
            """The model's template, for lm_eval's records; raises ConfigError for a template's name."""
            if isinstance(chat_template, str):
                raise ConfigError(
                    f"apply_chat_template is {chat_template!r}; {NAME} renders the model's own template for "
                    "conversations: give --apply_chat_template without a name"
                )
            return self.harness_model.chat_template() if chat_template else ""

        @property
        def tokenizer_name(self) -> str:
            """See LM."""
            return self.harness_model.tokenizer_name()

        def get_model_info(self) -> dict[str, Any]:
            """The information that lm_eval writes with the results, in addition to `model_args`."""
            model = self.harness_model
            return {
                "hetero_kv_version": metadata.version("hetero-kv"),
                "model_name": model.loaded.name,
                "model_dtype": str(model.loaded.model.dtype),
                "method": model.arguments.config,
                "max_seq_len": model.engine.max_seq_len,
                "batch": model.arguments.batch,
                "truncation": model.arguments.truncation,
                "decoded_context": model.arguments.decoded_context,
            }

    return HeteroKVLM
