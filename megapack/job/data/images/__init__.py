"""Images of samples, from data files to what a tower reads.

Modules:
    reader: files, data URIs and bytes -> grids and keys; pixels by the model's image processor
    rows: the images of a row -> their places among token ids
    stored: images beside the index of a data set
"""

from megapack.job.data.images.reader import ImageReader as ImageReader
from megapack.job.data.images.reader import SampleImage as SampleImage
