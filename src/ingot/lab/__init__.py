"""The laboratory: training, comparing and plotting optimizers. The library itself never imports it."""
