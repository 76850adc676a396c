"""Processes videos by transformers' own video processors, without torchvision.

processor  the media processor: frames in, arguments of the model and text out
finding    the checkpoint's video processor, and the token that stands for its embeddings
sampling   options, and the frames that transformers' rule chooses by them
operators  what these processors take from torchvision, computed by torch
"""
