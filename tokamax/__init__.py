"""tokamax: JAX kernels tuned by measuring, and by a cost model learned from every measurement."""

from tokamax import aot as aot
from tokamax import autotuning as autotuning
from tokamax import benchmarking as benchmarking
from tokamax import config as config
from tokamax import costmodel as costmodel
from tokamax._src.api import autotune as autotune
from tokamax._src.api import check as check
from tokamax._src.api import explain as explain
from tokamax._src.autotuning.result import AutotuningResult as AutotuningResult
from tokamax._src.benchmarking import BenchmarkData as BenchmarkData
from tokamax._src.benchmarking import benchmark as benchmark
from tokamax._src.benchmarking import standardize_function as standardize_function
from tokamax._src.bound_arguments import BoundArguments as BoundArguments
from tokamax._src.exporting import DISABLE_JAX_EXPORT_CHECKS as DISABLE_JAX_EXPORT_CHECKS
from tokamax._src.op import Op as Op
from tokamax._src.ops.dot_product_attention.api import dot_product_attention as dot_product_attention
from tokamax._src.ops.dot_product_attention.base import DotProductAttention as DotProductAttention
from tokamax._src.ops.dot_product_attention.pallas_mosaic_tpu import (
    PallasMosaicTpuAttention as PallasMosaicTpuAttention,
)
from tokamax._src.ops.dot_product_attention.pallas_mosaic_tpu import (
    PallasMosaicTpuAttentionVjp as PallasMosaicTpuAttentionVjp,
)
from tokamax._src.ops.dot_product_attention.xla_chunked import (
    XlaChunkedDotProductAttention as XlaChunkedDotProductAttention,
)
from tokamax._src.ops.dot_product_attention.xla_chunked import (
    XlaChunkedDotProductAttentionVjp as XlaChunkedDotProductAttentionVjp,
)
from tokamax._src.ops.linear_softmax_cross_entropy_loss.api import (
    linear_softmax_cross_entropy_loss as linear_softmax_cross_entropy_loss,
)
from tokamax._src.ops.linear_softmax_cross_entropy_loss.base import (
    LinearSoftmaxCrossEntropyLoss as LinearSoftmaxCrossEntropyLoss,
)
from tokamax._src.ops.linear_softmax_cross_entropy_loss.xla_chunked import (
    XlaChunkedLinearSoftmaxCrossEntropyLoss as XlaChunkedLinearSoftmaxCrossEntropyLoss,
)
from tokamax._src.ops.linear_softmax_cross_entropy_loss.xla_chunked import (
    XlaChunkedLinearSoftmaxCrossEntropyLossVjp as XlaChunkedLinearSoftmaxCrossEntropyLossVjp,
)
from tokamax._src.ops.ragged_dot.api import ragged_dot as ragged_dot
from tokamax._src.ops.ragged_dot.base import RaggedDot as RaggedDot
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import PallasMosaicTpuRaggedDot as PallasMosaicTpuRaggedDot
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import (
    PallasMosaicTpuRaggedDotLhsVjp as PallasMosaicTpuRaggedDotLhsVjp,
)
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import (
    PallasMosaicTpuRaggedDotRhsVjp as PallasMosaicTpuRaggedDotRhsVjp,
)
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import PallasMosaicTpuRaggedDotVjp as PallasMosaicTpuRaggedDotVjp
from tokamax._src.ops.ragged_dot.xla_chunked import XlaChunkedRaggedDot as XlaChunkedRaggedDot
from tokamax._src.ops.ragged_dot.xla_chunked import XlaChunkedRaggedDotVjp as XlaChunkedRaggedDotVjp
