"""Bound arguments, results, caches and the decision rule: `tokamax.autotuning`."""

from tokamax._src.api import bound_args_from_json as bound_args_from_json
from tokamax._src.api import bound_args_from_json as bound_args_from_json_file
from tokamax._src.api import bound_args_from_profile as bound_args_from_profile
from tokamax._src.api import bound_args_to_json as bound_args_to_json
from tokamax._src.api import get_bound_args as get_bound_args
from tokamax._src.api import implementations as implementations
from tokamax._src.autotuning.outcome import Failure as Failure
from tokamax._src.autotuning.outcome import fastest as fastest
from tokamax._src.autotuning.result import AutotuningResult as AutotuningResult
from tokamax._src.autotuning.result import Entry as Entry
from tokamax._src.autotuning.store import DirectoryStore as DirectoryStore
from tokamax._src.autotuning.store import library as library_cache
from tokamax._src.autotuning.store import private as private_cache
from tokamax._src.autotuning.summary import Summary as Summary
from tokamax._src.bound_arguments import BoundArguments as BoundArguments
from tokamax._src.bound_arguments import ConfigChoice as ConfigChoice
from tokamax._src.bound_arguments import Usage as Usage
from tokamax._src.checking import CheckReport as CheckReport
from tokamax._src.dispatch import forget as reload_caches
from tokamax._src.explanation import Explanation as Explanation
from tokamax._src.registry import register as register_implementation
from tokamax._src.registry import remember as register_value

__all__ = [
    "AutotuningResult",
    "BoundArguments",
    "CheckReport",
    "ConfigChoice",
    "DirectoryStore",
    "Entry",
    "Explanation",
    "Failure",
    "Summary",
    "Usage",
    "bound_args_from_json",
    "bound_args_from_json_file",
    "bound_args_from_profile",
    "bound_args_to_json",
    "fastest",
    "get_bound_args",
    "implementations",
    "library_cache",
    "private_cache",
    "register_implementation",
    "register_value",
    "reload_caches",
]
