"""The parts that families with an encoder share: the decoder of BART, Whisper and TrOCR, attention
to text and encoder in one softmax, the tower of patches of Pix2Struct and Kosmos-2.5, prompts."""
