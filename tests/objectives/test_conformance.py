"""Every objective obeys the laws of objectives."""

from manifoldkv.objectives.eigen_attention import EigenAttention
from manifoldkv.objectives.k_svd import KSVD
from manifoldkv.objectives.kq_svd import KQSVD
from manifoldkv.objectives.layer_output import LayerOutput
from manifoldkv.testing import ObjectiveConformance


class TestKSVD(ObjectiveConformance):
    objective = KSVD()


class TestEigenAttention(ObjectiveConformance):
    objective = EigenAttention()


class TestKQSVD(ObjectiveConformance):
    objective = KQSVD()


class TestLayerOutput(ObjectiveConformance):
    objective = LayerOutput()
