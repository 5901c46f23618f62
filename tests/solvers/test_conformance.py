"""Every solver obeys the laws of solvers."""

from manifoldkv.objectives.layer_output import LayerOutput
from manifoldkv.solvers.closed_form import ClosedForm
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.testing import SolverConformance


class TestClosedForm(SolverConformance):
    solver = ClosedForm()


class TestPredictor(SolverConformance):
    solver = Predictor(epochs=10)


class TestPredictorOnLayerOutput(SolverConformance):
    solver = Predictor(epochs=10)
    objective = LayerOutput()


class TestRiemannianAdam(SolverConformance):
    solver = RiemannianAdam(steps=60)


class TestEuclideanRiemannianAdam(SolverConformance):
    solver = RiemannianAdam(steps=60, metric="euclidean", learning_rate=1.0)


class TestRiemannianAdamOnLayerOutput(SolverConformance):
    solver = RiemannianAdam(steps=40)
    objective = LayerOutput()
