"""Every objective obeys the laws of objectives."""

from manifoldkv.learn.objectives.eigen_attention import EigenAttention
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.objectives.kq_svd import KQSVD
from manifoldkv.learn.objectives.layer_output import LayerOutput
from manifoldkv.testing import ObjectiveConformance


class TestKSVD(ObjectiveConformance):
    objective = KSVD()


class TestEigenAttention(ObjectiveConformance):
    objective = EigenAttention()


class TestKQSVD(ObjectiveConformance):
    objective = KQSVD()


class TestLayerOutput(ObjectiveConformance):
    objective = LayerOutput()
