//! The threads of the reference's loops.

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use crate::strided::CHUNK;

/// Does some work on a thread of the caller's own, to which the loops of the reference then keep. Otherwise they are handed to one pool of all
/// cores, which costs a caller that keeps all cores busy itself two switches of threads per loop.
///
/// The thread belongs to this work from here on: it should end with it.
pub fn on_own_thread<T>(work: impl FnOnce() -> T) -> T {
    // A thread that is in a pool already, or a pool that cannot be made, changes nothing but the time it takes.
    let pool = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    let result = work();
    drop(pool);
    result
}

/// Calls `task` with each piece of some values and its number: on all cores, or on this thread if there is one piece alone.
pub(crate) fn in_pieces<T: Send>(values: &mut [T], length: usize, task: impl Fn(usize, &mut [T]) + Send + Sync) {
    if values.len() <= length {
        values.chunks_mut(length).enumerate().for_each(|(index, piece)| task(index, piece));
    } else {
        values.par_chunks_mut(length).enumerate().for_each(|(index, piece)| task(index, piece));
    }
}

/// Whether something holds for any of some values.
pub(crate) fn any<T: Sync>(values: &[T], holds: impl Fn(&T) -> bool + Send + Sync) -> bool {
    if values.len() <= CHUNK {
        values.iter().any(holds)
    } else {
        values.par_chunks(CHUNK).any(|chunk| chunk.iter().any(&holds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_keep_to_the_thread() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = std::thread::current().id();
                let elsewhere = || (0..1000).into_par_iter().filter(|_| std::thread::current().id() != own).count();
                assert_eq!(elsewhere(), 1000, "a pool of all cores");
                let mut pieces = vec![0; 3 * CHUNK];
                in_pieces(&mut pieces[..CHUNK], CHUNK, |_, _| assert_eq!(std::thread::current().id(), own));
                in_pieces(&mut pieces, CHUNK, |index, piece| piece.fill(index));
                assert!((0..3).all(|index| pieces[index * CHUNK..][..CHUNK].iter().all(|&x| x == index)));
                assert!(any(&pieces, |&x| x == 2) && !any(&pieces[..CHUNK], |&x| x == 2));
                assert_eq!(on_own_thread(elsewhere), 0);
                assert_eq!(on_own_thread(|| on_own_thread(elsewhere)), 0, "once more changes nothing");
            });
        });
    }
}
