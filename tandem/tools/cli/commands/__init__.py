"""The commands of `tandem`, one file each."""
