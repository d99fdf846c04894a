"""The rank of a prompt's keys: singular values of keys before and after RoPE, of values and of hidden states.

    python -m benchmarks.singular_values --text FILE [--length 4096] [--plot FILE.png]

ShadowKV (arXiv:2410.21465, figure 1) on any model: per layer, the matrix [tokens, channels] of all kv heads together;
its singular values relative to the largest, as a mean over layers, and the leading ones' share of the energy (sum of
squares). Hidden states are the layers' inputs; keys before RoPE are the output of `k_proj`, so the model's attention
must have this module, and no norm between it and RoPE.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.models import DEFAULT_MODEL, load_model

MATRICES = {
    "pre-RoPE keys": "tab:blue",
    "post-RoPE keys": "tab:red",
    "values": "tab:green",
    "hidden states": "tab:gray",
}
_SHARES = (0.9, 0.99)


@torch.no_grad()
def singular_values(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per kind of MATRICES the singular values of every layer, [layers, channels] float64, falling.

    Args:
        tokens: [1, length] int64.

    Raises HeteroKVError for a model whose attention has no `k_proj`, or norms keys before they are rotated.
    """
    layers = model.model.layers
    hooked: dict[str, list[torch.Tensor]] = {"pre-RoPE keys": [], "hidden states": []}
    handles = []
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        if not hasattr(attention, "k_proj") or hasattr(attention, "k_norm"):
            raise HeteroKVError(
                f"layer {index} ({type(attention).__name__}) gives no keys before rotation: it has no k_proj, or a "
                "k_norm behind it; take a model of the Llama, Qwen2 or Mistral family"
            )
        handles.append(layer.register_forward_pre_hook(_keep_input(hooked["hidden states"]), with_kwargs=True))
        handles.append(attention.k_proj.register_forward_hook(_keep_output(hooked["pre-RoPE keys"])))
    try:
        recorded = record_prefill(model, tokens, chunk_size=tokens.shape[1])
    finally:
        for handle in handles:
            handle.remove()
    matrices = {
        **hooked,
        "post-RoPE keys": [layer.keys[0].transpose(0, 1).flatten(1) for layer in recorded.layers],
        "values": [layer.values[0].transpose(0, 1).flatten(1) for layer in recorded.layers],
    }
    return {kind: torch.stack([_spectrum(each) for each in matrices[kind]]) for kind in MATRICES}


def _keep_input(kept: list[torch.Tensor]) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append((args[0] if args else kwargs["hidden_states"])[0])

    return hook


def _keep_output(kept: list[torch.Tensor]) -> Any:
    def hook(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        kept.append(output[0])

    return hook


def _spectrum(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


def rank_for(values: torch.Tensor, share: float) -> torch.Tensor:
    """The lowest rank per layer with `share` of the energy: [layers] int64, from [layers, channels]."""
    energy = values.square().cumsum(-1)
    return (energy < share * energy[:, -1:]).sum(-1) + 1


def plot(spectra: dict[str, torch.Tensor], path: Path, title: str) -> None:
    """The mean relative singular values against their number as a share of the channels, one line per kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for kind, colour in MATRICES.items():
        relative = (spectra[kind] / spectra[kind][:, :1]).mean(0)
        share = torch.arange(1, len(relative) + 1) / len(relative)
        axes.plot(share, relative, color=colour, label=f"{kind} ({len(relative)} channels)")
    axes.set(
        yscale="log",
        xlabel="singular value, as a share of the channels",
        ylabel="relative to the largest",
        xlim=(0, 1),
        title=title,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Print the table; write the plot with --plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, required=True, help="text, or JSON with a `text` field")
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype="float32")
    text = " ".join(Haystack.from_file(arguments.text).take(arguments.length))
    tokens = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, : arguments.length]
    spectra = singular_values(loaded.model, tokens)
    print(f"{tokens.shape[1]} tokens; rank that holds a share of the energy, mean (most) over the layers\n")
    print(f"| matrix | channels | {' | '.join(f'{share:.0%}' for share in _SHARES)} |")
    print("|---|---:|---:|---:|")
    for kind, values in spectra.items():
        ranks = [rank_for(values, share).double() for share in _SHARES]
        cells = " | ".join(f"{rank.mean():.0f} ({rank.max():.0f})" for rank in ranks)
        print(f"| {kind} | {values.shape[1]} | {cells} |")
    if arguments.plot:
        plot(spectra, arguments.plot, f"{arguments.model}, {tokens.shape[1]:,} tokens")
        print(f"\n{arguments.plot}")


if __name__ == "__main__":
    main()
