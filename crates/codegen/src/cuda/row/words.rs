//! Parameters of row kernels: the words of arguments and launch axes.

use crate::argument::ArgBinding;
use crate::body::{Access, ArgSpec};
use crate::cuda::grid::Word;
use crate::cuda::row::layout::layout;

/// The words of an argument: its address, then what its rows' numbers are taken apart by.
pub(crate) fn argument_words(spec: &ArgSpec, flat: bool, binding: &ArgBinding, position: usize) -> Vec<Word> {
    let address = Word::Argument { position, offset: binding.offset * spec.dtype.bytes() };
    words_at(address, spec, flat, binding)
}

/// The same of what lies at an address.
pub(crate) fn words_at(address: Word, spec: &ArgSpec, flat: bool, binding: &ArgBinding) -> Vec<Word> {
    let size = spec.dtype.bytes();
    let mut words = vec![address];
    let layout = layout(spec.access, flat, binding);
    if matches!(spec.access, Access::GatheredRow { .. }) {
        let stride = layout.axes.first().map_or(0, |&(_, stride)| stride);
        words.extend([Word::Number((stride * size) as u64), Word::Number(binding.table_rows as u64)]);
        return words;
    }
    for (axis, &(count, stride)) in layout.axes.iter().enumerate() {
        words.push(Word::Number((stride * size) as u64));
        if axis > 0 {
            words.push(Word::Number(count as u64));
        }
    }
    words
}

pub(crate) fn axis_words(axes: &[(usize, usize)]) -> impl Iterator<Item = Word> {
    axes.iter().flat_map(|&(divide, modulo)| [Word::Number(divide as u64), Word::Number(modulo as u64)])
}
