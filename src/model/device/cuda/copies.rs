//! Copies between host and GPU that run while the GPU computes: they use page-locked memory and their own
//! streams, and events order them with the computation. Owns the streams and the page-locked memory, which is
//! reused: locking pages takes longer than copying them.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DeviceRepr, DriverError, PinnedHostSlice,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{Device, Result, Storage, Tensor, bail};

/// The least capacity of page-locked memory, in numbers.
const LEAST: usize = 1 << 14;

/// The streams and the page-locked memory for the copies of one GPU.
pub struct Copies {
    device: CudaDevice,
    inward: Arc<CudaStream>,
    outward: Arc<CudaStream>,
    /// Page-locked memory that no copy uses.
    words: Vec<PinnedHostSlice<u32>>,
    numbers: Vec<PinnedHostSlice<f32>>,
}

/// Words on the device. They must exist until the computation that reads them is done, which Rust's lifetimes
/// do not show: [`Copies::fetch`] takes them over.
pub struct HostToDevice {
    /// `[words]`.
    pub tensor: Tensor,
    room: PinnedHostSlice<u32>,
}

/// Numbers on their way to the host.
pub struct DeviceToHost {
    /// What the copy reads and writes; kept until it is done.
    parts: Option<(HostToDevice, Tensor, PinnedHostSlice<f32>)>,
    done: CudaEvent,
}

impl Copies {
    /// Streams for copies to and from `device`.
    ///
    /// # Errors
    /// `device` is no GPU, or its driver cannot create a stream.
    pub fn new(device: &Device) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        let context = device.cuda_stream().context().clone();
        let (inward, outward) = (context.new_stream().w()?, context.new_stream().w()?);
        Ok(Self { device, inward, outward, words: Vec::new(), numbers: Vec::new() })
    }

    /// Copies `words` to the device. Work that is submitted afterwards finds them there.
    ///
    /// # Errors
    /// The driver's error.
    pub fn upload(&mut self, words: &[u32]) -> Result<HostToDevice> {
        let mut room = room(&mut self.words, words.len(), &self.inward).w()?;
        let there = &mut room.as_mut_slice().w()?[..words.len()];
        there.copy_from_slice(words);
        let copy = self.inward.clone_htod(there).w()?;
        let arrived = self.inward.record_event(None).w()?;
        self.device.cuda_stream().wait(&arrived).w()?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copy, self.device.clone()));
        let tensor = Tensor::from_storage(storage, words.len(), BackpropOp::none(), false);
        Ok(HostToDevice { tensor, room })
    }

    /// Copies `computed`, a whole f32 tensor that was computed from `uploaded`, to the host once the device has
    /// computed it.
    ///
    /// # Errors
    /// The error of the computation's submission, or the driver's. Then nothing is running any more.
    pub fn fetch(&mut self, uploaded: HostToDevice, computed: Result<Tensor>) -> Result<DeviceToHost> {
        let copied = computed.and_then(|computed| {
            let (room, done) = self.copy_out(&computed)?;
            Ok((computed, room, done))
        });
        match copied {
            Ok((computed, room, done)) => Ok(DeviceToHost { parts: Some((uploaded, computed, room)), done }),
            Err(error) => {
                // The device may still read memory that is freed now. A fault shows in the next call.
                let _ = self.device.cuda_stream().synchronize();
                let _ = self.outward.synchronize();
                Err(error)
            }
        }
    }

    fn copy_out(&mut self, computed: &Tensor) -> Result<(PinnedHostSlice<f32>, CudaEvent)> {
        let mut room = room(&mut self.numbers, computed.elem_count(), &self.outward).w()?;
        let ready = self.device.cuda_stream().record_event(None).w()?;
        self.outward.wait(&ready).w()?;
        {
            let (storage, layout) = computed.storage_and_layout();
            let (Storage::Cuda(storage), Some((0, end))) = (&*storage, layout.contiguous_offsets()) else {
                bail!("only a whole tensor of a GPU is fetched from it, and this is {layout:?}");
            };
            let CudaStorageSlice::F32(numbers) = &storage.slice else {
                bail!("only f32 is fetched from a GPU, not {:?}", computed.dtype());
            };
            let there = &mut room.as_mut_slice().w()?[..end];
            self.outward.memcpy_dtoh(&numbers.slice(..end), there).w()?;
        }
        // The waiting thread sleeps: a core of the host is worth more than some microseconds.
        let done = self.outward.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
        Ok((room, done))
    }

    /// Waits for a copy to the host.
    ///
    /// # Errors
    /// The driver's error, which may come from earlier work.
    pub fn wait(&mut self, mut fetched: DeviceToHost) -> Result<Vec<f32>> {
        fetched.done.synchronize().w()?;
        let Some((uploaded, computed, room)) = fetched.parts.take() else { return Ok(Vec::new()) };
        let numbers = room.as_slice().w()?[..computed.elem_count()].to_vec();
        self.words.push(uploaded.room);
        self.numbers.push(room);
        Ok(numbers)
    }
}

impl Drop for DeviceToHost {
    fn drop(&mut self) {
        // An error is ignored: after a device fault there is nothing to wait for, and this process ends.
        let _ = self.done.synchronize();
    }
}

/// Page-locked memory for `count` numbers.
fn room<T: DeviceRepr>(
    free: &mut Vec<PinnedHostSlice<T>>,
    count: usize,
    stream: &CudaStream,
) -> std::result::Result<PinnedHostSlice<T>, DriverError> {
    match free.pop() {
        Some(room) if room.len() >= count => Ok(room),
        // Memory that is too small is freed.
        _ => lock_pages(stream, count.max(LEAST).next_power_of_two()),
    }
}

#[expect(unsafe_code, reason = "such memory is only to be had uninitialised")]
fn lock_pages<T: DeviceRepr>(
    stream: &CudaStream,
    count: usize,
) -> std::result::Result<PinnedHostSlice<T>, DriverError> {
    // SAFETY: any bits are a valid number of the two types used here, and each is written before it is read.
    // Not write-combined, since the CPU reads the results.
    unsafe { stream.context().alloc_pinned_with_flags(count, 0) }
}
