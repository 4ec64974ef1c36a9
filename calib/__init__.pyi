# for type checkers, which cannot see names that resolve on first use
from calib.capture.loop import calibrate as calibrate
from calib.capture.training import scales_for as scales_for
from calib.errors import CalibrationError as CalibrationError
from calib.errors import Fp8kvError as Fp8kvError
from calib.errors import InputError as InputError
from calib.errors import UnsupportedExportError as UnsupportedExportError
from calib.errors import UnsupportedModelError as UnsupportedModelError
from calib.job import run as run
from calib.recipe import Recipe as Recipe
from calib.recipe import load_recipe as load_recipe
from calib.scales.scales import KVScales as KVScales
from calib.scales.scales import LayerScales as LayerScales
from calib.scales.stats import KVStats as KVStats
from calib.scales.stats import derive_scales as derive_scales
from calib.scales.stats_file import load_scales as load_scales
from calib.scales.stats_file import load_stats as load_stats
from calib.scales.stats_file import save_stats as save_stats
from calib.serving.push import ScalesNotDeliveredError as ScalesNotDeliveredError
from calib.serving.push import push_scales as push_scales

__version__: str
