"""Configs for TPUs that are not here, through their real compiler: `tokamax.aot` (extra `aot-tpu`)."""

from tokamax._src.aot.check import Checker as Checker
from tokamax._src.aot.check import check as check
from tokamax._src.aot.verdict import Verdict as Verdict
