# _version.py is written by the build, from the version in meson.build: a source tree has none.
__version__: str
cuda_toolkit: str
