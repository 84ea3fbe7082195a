//! Limits the work of one operation on a requester's grammar, in a process that does nothing else. The work is measured
//! in allocated bytes, since the same operation allocates the same bytes on every machine, however busy it is.
//! (`server` says why llguidance's own limits do not suffice.) Processor time is only a backstop. Owns the counters of
//! the process. Allocations are counted only while a budget is armed.

use std::alloc::{GlobalAlloc, Layout};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};
use std::time::Duration;

use mimalloc::MiMalloc;
use nix::libc;

use super::wire::{self, FrameKind};

/// The limits of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Bytes that the operation may allocate, freed ones included: its work.
    pub(super) allocated: i64,
    /// Bytes that the process may hold at once, counted from its first operation.
    pub(super) held: i64,
    /// Processor time, after which the kernel ends the process. It is far above the time that `allocated` takes, so
    /// that a slow machine does not change a verdict.
    pub(super) time: Duration,
}

/// Whether allocations are counted. Written by the only thread of the process.
static ARMED: AtomicBool = AtomicBool::new(false);
/// Bytes that may still be allocated.
static ALLOCATED_LEFT: AtomicI64 = AtomicI64::new(0);
/// Bytes that may still be held.
static HELD_LEFT: AtomicI64 = AtomicI64::new(0);
/// Bytes held since the first operation.
static HELD: AtomicI64 = AtomicI64::new(0);
/// The socket to which an exceeded budget is reported.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// The program's allocator: mimalloc, with a count of what a grammar allocates. (With the system's allocator, large
/// model outputs cause page faults.) A program with a model of its own installs it with `#[global_allocator]`. Without
/// it, a grammar is limited only by processor time and 1 GiB of address space.
pub struct Allocator;

/// Whether [`Allocator`] is the allocator of this program.
pub(super) fn allocator_is_installed() -> bool {
    let limit = 1 << 40;
    ALLOCATED_LEFT.store(limit, Ordering::Relaxed);
    HELD_LEFT.store(limit, Ordering::Relaxed);
    ARMED.store(true, Ordering::Relaxed);
    drop(std::hint::black_box(Vec::<u8>::with_capacity(64)));
    ARMED.store(false, Ordering::Relaxed);
    ALLOCATED_LEFT.load(Ordering::Relaxed) != limit
}

/// Runs an operation within a budget. If the operation needs more, the process reports this over the socket and ends.
pub(super) fn run_within<T>(budget: Budget, socket: &UnixStream, operation: impl FnOnce() -> T) -> T {
    SOCKET.store(socket.as_raw_fd(), Ordering::Relaxed);
    ALLOCATED_LEFT.store(budget.allocated, Ordering::Relaxed);
    HELD_LEFT.store(budget.held - HELD.load(Ordering::Relaxed), Ordering::Relaxed);
    set_timer(budget.time);
    ARMED.store(true, Ordering::Relaxed);
    let result = operation();
    ARMED.store(false, Ordering::Relaxed);
    set_timer(Duration::ZERO);
    HELD.store(budget.held - HELD_LEFT.load(Ordering::Relaxed), Ordering::Relaxed);
    result
}

/// Makes the kernel end the process after this processor time, or never if it is zero.
#[expect(unsafe_code, reason = "setitimer(2) has no safe form")]
fn set_timer(time: Duration) {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let once = libc::itimerval {
        it_interval: none,
        it_value: libc::timeval {
            tv_sec: time.as_secs() as libc::time_t,
            tv_usec: time.subsec_micros().into(),
        },
    };
    // SAFETY: both structures live until the call returns. SIGPROF has its default action, which ends the process.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const once, ptr::null_mut()) };
}

/// Counts an allocation of `bytes`, and `freed` bytes that are given back.
fn charge(bytes: usize, freed: usize) {
    if !ARMED.load(Ordering::Relaxed) {
        return;
    }
    let (bytes, freed) = (bytes as i64, freed as i64);
    let allocated = ALLOCATED_LEFT.fetch_sub(bytes, Ordering::Relaxed) - bytes;
    let held = HELD_LEFT.fetch_sub(bytes - freed, Ordering::Relaxed) - (bytes - freed);
    if allocated < 0 || held < 0 {
        exceeded(SOCKET.load(Ordering::Relaxed));
    }
}

/// Ends the process from inside an allocation. Allocates nothing, and runs no destructors.
#[cold]
#[expect(
    unsafe_code,
    reason = "an allocator may neither unwind nor allocate; only the system calls do neither"
)]
fn exceeded(socket: RawFd) -> ! {
    let frame = wire::header(FrameKind::TooCostly, 0);
    // SAFETY: the frame outlives the call. If the socket is closed meanwhile, the call fails, which has no effect.
    unsafe {
        libc::send(socket, frame.as_ptr().cast(), frame.len(), libc::MSG_NOSIGNAL);
        libc::_exit(0)
    }
}

// SAFETY: every method passes its arguments on to mimalloc unchanged; counting neither allocates nor unwinds.
#[expect(unsafe_code, reason = "an allocator is unsafe to write")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size(), 0);
        // SAFETY: as for the caller.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size(), 0);
        // SAFETY: as for the caller.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        charge(size, layout.size());
        // SAFETY: as for the caller.
        unsafe { MiMalloc.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        charge(0, layout.size());
        // SAFETY: as for the caller.
        unsafe { MiMalloc.dealloc(memory, layout) }
    }
}
