"""The commands of ``opacus-ext``, a file each."""
