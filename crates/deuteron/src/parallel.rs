//! Independent pieces of work on all cores, with results delivered on one thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use deuteron_reference::on_own_thread;

/// Runs pieces `0..count` on all cores and passes each result to `receive`, on the calling thread, when it is ready.
pub(crate) fn for_each<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync, mut receive: impl FnMut(usize, T)) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(count);
    let next = AtomicUsize::new(0);
    let (send, results) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (send, next, work) = (send.clone(), &next, &work);
            let pieces = move || {
                loop {
                    let piece = next.fetch_add(1, Ordering::Relaxed);
                    // The receiver outlives all threads of the scope unless it panicked; then there is nothing left to do.
                    if piece >= count || send.send((piece, work(piece))).is_err() {
                        return;
                    }
                }
            };
            // Where pieces keep all cores busy, the reference need not share each of them out.
            scope.spawn(move || if threads == cores { on_own_thread(pieces) } else { pieces() });
        }
        drop(send);
        results.iter().for_each(|(piece, result)| receive(piece, result));
    });
}

/// The result of a piece of work, or its panic message: one defect must not end a run of thousands.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    // Partial changes are dropped with the piece, and poisoned locks are recovered.
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        format!("panicked: {}", text.unwrap_or("no message"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_answer() {
        assert_eq!(guarded(|| 3), Ok(3));
        let number = 7;
        assert_eq!(guarded(|| -> u8 { panic!("no {number}") }), Err("panicked: no 7".to_string()));
    }

    #[test]
    fn every_piece_is_done_once() {
        let mut seen = vec![0; 1000];
        for_each(
            1000,
            |piece| piece * 3,
            |piece, result| {
                assert_eq!(result, piece * 3);
                seen[piece] += 1;
            },
        );
        assert!(seen.iter().all(|&times| times == 1));
        for_each(0, |_| (), |_, ()| panic!("there is nothing to do"));
    }
}
