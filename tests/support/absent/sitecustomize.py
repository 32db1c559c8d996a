"""What Python imports first in every process that has this folder in its PYTHONPATH."""

from tests.support.absent_torchvision import install

install()
