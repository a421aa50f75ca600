"""The ops of the NPU."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.ops import Ops
from ...kernels.ops.register import REFERENCES, KernelSet
from .attention import ATTENTION
from .cache import WRITES
from .elementwise import ACTIVATION, NORM, ROPE
from .experts import MOE
from .latent import latent_attention
from .lora import LORA
from .products import LINEAR

# Sampling is the reference: npu_top_k_top_p cannot leave out top_k in one row of a batch (it needs 1 to 1,024), and
# removes some of the tokens that are as likely as the last one of the nucleus.
OPS = Ops(
    norm=NORM,
    activation=ACTIVATION,
    rope=ROPE,
    linear=LINEAR,
    moe=MOE,
    lora=LORA,
    kv=WRITES,
    attention=replace(ATTENTION, latent=latent_attention),
)
KERNELS = (KernelSet("torch_npu", OPS), REFERENCES)
