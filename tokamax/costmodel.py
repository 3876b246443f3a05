"""Cost models: fit, predict, save, and the evaluation beside their rivals: `tokamax.costmodel`."""

from tokamax._src.costmodel.dataset import Problem as Problem
from tokamax._src.costmodel.dataset import problems_from_entries as problems_from_entries
from tokamax._src.costmodel.evaluate import Report as Report
from tokamax._src.costmodel.evaluate import evaluate_family as evaluate_family
from tokamax._src.costmodel.evaluate import evaluate_folds as evaluate_folds
from tokamax._src.costmodel.evaluate import families as families
from tokamax._src.costmodel.model import CostModel as CostModel
from tokamax._src.costmodel.model import Prediction as Prediction
