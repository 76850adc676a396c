"""Reads sounds of any form as samples: one channel, float32, at the rate that a model expects.

    file  --> PyAV, in a process that can die --> timed --> mean of the channels --> resampled
    array ----------------------------------------------> mean of the channels --> resampled

Samples of a file at the right rate are bit for bit those of soundfile, with which transformers
loads sounds: whole numbers divided by their largest, channels averaged. Other rates go through
libswresample with its defaults; see resampling.py. Importing this package imports neither PyAV nor
torch.
"""
