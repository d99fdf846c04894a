"""The boundary around a foreign model: whatever a library raises over its files becomes one kind of error."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.errors import ModelError, said

# What a failed assertion in the tokenizers' own library arrives as; no Exception, and without a name to import.
TOKENIZERS_PANIC = "PanicException"


@contextmanager
def refusals(name: str, failed: str) -> Iterator[None]:
    """Turn what transformers, and what it calls, raises about a model it cannot load into a `ModelError`.

    Args:
        name: the model's.
        failed: what the error says of it, "cannot be loaded from 'x.gguf'".
    """
    try:
        yield
    except HeteroKVError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit into the GPU's memory; use device cpu or a smaller model") from error
    except MemoryError as error:
        raise ModelError(f"{name} does not fit into memory; use dtype bfloat16 or a smaller model") from error
    except pickle.UnpicklingError as error:
        # torch reads only what holds numbers, and advises to read the rest all the same.
        raise ModelError(
            f"{name} {failed}: a file of its weights is damaged, or holds more than numbers, which to read would be to "
            "run it; give the model's .safetensors files"
        ) from error
    except BaseException as error:
        # Broad, because what is read is foreign: whatever a library makes of it is about the model. Only what a user or
        # the model's own code asks for (Ctrl-C, exit) goes on its way.
        if not isinstance(error, Exception) and type(error).__name__ != TOKENIZERS_PANIC:
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} brings Python code of its own, which is run only if you say so: read the code, "
                "then set trust_remote_code"
            ) from error
        raise ModelError(
            f"{name} {failed}: {said(error)}; "
            "check that its files are whole and that this version of transformers supports it"
        ) from error
