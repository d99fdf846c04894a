"""The boundary around a foreign model: any exception of a library about its files becomes a ModelError."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.errors import ModelError, error_text

# The class of a failed assertion in the tokenizers library; it is no Exception, and cannot be imported.
TOKENIZERS_PANIC = "PanicException"


@contextmanager
def as_model_error(name: str, failed: str) -> Iterator[None]:
    """Turn exceptions of transformers, and of the libraries it calls, into a `ModelError`.

    Args:
        name: the model's name.
        failed: the failure in words, "cannot be loaded from 'x.gguf'".
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
        # torch refuses pickles with anything but tensors, and its message suggests to load them regardless.
        raise ModelError(
            f"{name} {failed}: a file of its weights is damaged, or contains code, which loading would run; give the "
            "model's .safetensors files"
        ) from error
    except BaseException as error:
        # Broad, because the files are foreign: any exception is about the model, except Ctrl-C and exit.
        if not isinstance(error, Exception) and type(error).__name__ != TOKENIZERS_PANIC:
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} includes Python code, which runs only with your consent: read the code, then set "
                "trust_remote_code"
            ) from error
        raise ModelError(
            f"{name} {failed}: {error_text(error)}; "
            "check that its files are complete and that this version of transformers supports it"
        ) from error
