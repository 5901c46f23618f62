"""Every solver obeys the laws of solvers."""

from manifoldkv.objectives.kq_svd import KQSVD
from manifoldkv.objectives.layer_output import LayerOutput
from manifoldkv.solvers.closed_form import ClosedForm
from manifoldkv.solvers.flag import Flag, ObliqueFlag
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.solvers.riemannian_lbfgs import ObliqueLBFGS, RiemannianLBFGS
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


class TestRiemannianLBFGS(SolverConformance):
    solver = RiemannianLBFGS()
    objective = KQSVD()


class TestRiemannianLBFGSOnLayerOutput(SolverConformance):
    solver = RiemannianLBFGS(steps=8)
    objective = LayerOutput()


class TestOblique(SolverConformance):
    solver = ObliqueLBFGS()
    objective = KQSVD()


class TestObliqueOnLayerOutput(SolverConformance):
    solver = ObliqueLBFGS(steps=8)
    objective = LayerOutput()


class TestFlag(SolverConformance):
    solver = Flag()
    objective = KQSVD()


class TestFlagOnLayerOutput(SolverConformance):
    solver = Flag(steps=8)
    objective = LayerOutput()


class TestObliqueFlag(SolverConformance):
    solver = ObliqueFlag()
    objective = KQSVD()


class TestObliqueFlagOnLayerOutput(SolverConformance):
    solver = ObliqueFlag(steps=8)
    objective = LayerOutput()
