"""`attnreg explain`: which backend would run a call, on this machine or on a simulated device."""

from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.failures import NOTHING_RUNS
from attnreg.cli.output import AsJson, print_json
from attnreg.cli.parsing import names, spec_of
from attnreg.cli.torch_first import import_torch

if TYPE_CHECKING:
    from attnreg.contract.spec import AttentionSpec
    from attnreg.explanation import Explanation

__all__ = ["explain"]

# Every option gives its name: with a metavar alone, typer 0.27.0 to 0.27.3 loses it.
Query = Annotated[
    str,
    typer.Option(
        "--q", metavar="B,S,H,D", help="Batch, length, heads and head dim (varlen: longest length)."
    ),
]
Key = Annotated[
    str, typer.Option("--kv", metavar="B,S,H,D", help="The same of key and value; as the query unless given.")
]
Where = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, or a simulated sm_90; else this machine's."
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16, fp32, fp64, or torch's name.")
]
Causal = Annotated[bool, typer.Option("--causal", help="No query sees a later key.")]
Window = Annotated[
    str,
    typer.Option("--window", metavar="L,R", show_default=False, help="Keys seen before and after; -1: all."),
]
Backward = Annotated[bool, typer.Option("--backward", help="Gradients are needed.")]
Varlen = Annotated[bool, typer.Option("--varlen", help="Packed sequences with offsets.")]
TokensQ = Annotated[
    int,
    typer.Option(
        "--tokens-q", metavar="N", show_default=False, help="Packed tokens; batch x longest unless given."
    ),
]
TokensK = Annotated[
    int, typer.Option("--tokens-k", metavar="N", show_default=False, help="The same of key and value.")
]
ValueDim = Annotated[
    int | None,
    typer.Option("--head-dim-v", metavar="N", min=1, help="Head dim of the value, if it is another."),
]
Scale = Annotated[float | None, typer.Option("--scale", metavar="X", help="Factor on the scores.")]
Dropout = Annotated[
    float, typer.Option("--dropout", metavar="P", show_default=False, help="Probability of dropping.")
]
Bias = Annotated[bool, typer.Option("--bias", help="With an attn_mask or bias tensor.")]
Alibi = Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")]
Paged = Annotated[
    int | None, typer.Option("--paged", metavar="N", min=1, help="Key-value cache in pages of N tokens.")
]
SequsedK = Annotated[bool, typer.Option("--seqused-k", help="With a count of keys for each sequence.")]
NumSplits = Annotated[
    int | None, typer.Option("--num-splits", metavar="N", help="Split the keys into so many pieces.")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Deterministic algorithms are on.")]
Capture = Annotated[bool, typer.Option("--capture", help="Inside a CUDA graph capture.")]
Only = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="As backend= on the call: obeyed or refused.")
]
Prefer = Annotated[
    list[str],
    typer.Option("--prefer", metavar="NAME", help="As use_backend(...): names by comma, or repeated."),
]


def explain(
    q: Query,
    kv: Key = "",
    device: Where = "",
    dtype: Dtype = "bf16",
    causal: Causal = False,
    window: Window = "-1,-1",
    backward: Backward = False,
    varlen: Varlen = False,
    tokens_q: TokensQ = -1,
    tokens_k: TokensK = -1,
    head_dim_v: ValueDim = None,
    scale: Scale = None,
    dropout: Dropout = 0.0,
    bias: Bias = False,
    alibi: Alibi = False,
    paged: Paged = None,
    seqused_k: SequsedK = False,
    num_splits: NumSplits = None,
    deterministic: Deterministic = False,
    capture: Capture = False,
    backend: Only = "",
    prefer: Prefer = [],  # noqa: B006 - typer makes a new list for each call
    as_json: AsJson = False,
) -> None:
    """Say which backend runs a call, and why.

    Every other backend is listed with every reason against it. Nothing is run.
    """
    import_torch()
    spec = spec_of(
        q, kv or q, device, dtype, window, causal, head_dim_v, varlen=varlen, tokens_q=tokens_q,
        tokens_k=tokens_k, dropout=dropout, bias=bias, alibi=alibi, page_size=paged, seqused_k=seqused_k,
        num_splits=num_splits, needs_backward=backward, deterministic=deterministic, capturing=capture,
        positive_scale=scale is None or scale > 0.0,
    )  # fmt: skip
    _report(_explained(spec, backend, names("--prefer", prefer)), as_json)


def _report(found: "Explanation", as_json: bool) -> None:
    if as_json:
        print_json({"runs": found.runs, "backend": found.backend, "source": found.source, **found.to_dict()})
    else:
        typer.echo(str(found))
    if not found.runs:
        raise typer.Exit(NOTHING_RUNS)


def _explained(spec: "AttentionSpec", only: str, preferred: tuple[str, ...]) -> "Explanation":
    """Explain a call as if it came with `backend=` or inside `use_backend`.

    Those two load their backends; here they needn't be loadable, so that a call for another machine
    is explained with all its reasons.
    """
    from attnreg import _registry, explanation
    from attnreg.dispatch import scope
    from attnreg.selection.decision import Preference

    asked = (only,) if only else preferred
    found = tuple(_registry.find(name).name for name in asked)
    if not found:
        return explanation.explain(spec)
    source = f"{'--backend' if only else '--prefer'} {','.join(found)}"
    token = scope.enter(scope.make_choice(Preference(source, found, exclusive=bool(only))))
    try:
        return explanation.explain(spec)
    finally:
        scope.leave(token)
