"""Measuring on its own: `tokamax.benchmarking`."""

from tokamax._src.benchmarking import BenchmarkData as BenchmarkData
from tokamax._src.benchmarking import benchmark as benchmark
from tokamax._src.benchmarking import compile_benchmark as compile_benchmark
from tokamax._src.benchmarking import compile_function as compile_function
from tokamax._src.benchmarking import standardize_function as standardize_function
from tokamax._src.timing import RecordedTimer as RecordedTimer
from tokamax._src.timing import Timer as Timer
from tokamax._src.timing import get_timer as get_timer
from tokamax._src.timing import wall_clock as wall_clock
from tokamax._src.timing import wall_clock_min as wall_clock_min
