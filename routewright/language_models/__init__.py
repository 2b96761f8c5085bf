"""Backbones: where the weights come from, and the dtype this machine runs fastest."""
