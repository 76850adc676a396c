"""The base of image processors that make an image several tiles, crops or slices. Importing this
package imports neither Pillow nor torch."""
