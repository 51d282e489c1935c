"""Advantages, losses and their arithmetic: pure torch, one small file each, chosen by name."""
