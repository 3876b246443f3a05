"""Options of dispatch, each scoped to a thread by `with`: `tokamax.config`."""

from tokamax._src.options import autotuning_cache_miss_fallback as autotuning_cache_miss_fallback
from tokamax._src.options import cost_model as cost_model
from tokamax._src.options import cross_compile as cross_compile
from tokamax._src.options import freshness as freshness
from tokamax._src.options import private_cache as private_cache
from tokamax._src.options import replay as replay
