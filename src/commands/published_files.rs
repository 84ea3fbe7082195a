//! The files of `sconce publish --output`: which name and which format the file of each task has. Owns the names of a run,
//! of which no two may be the same.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};

use super::requests::{Request, Requests};
use crate::cli::Publish;
use crate::client::whole_file::{is_special, write_new, write_whole};
use crate::protocol::batch_line::body_value;
use crate::protocol::endpoints::IMAGE_GENERATION_URL;
use crate::protocol::results::FileFormat;
use crate::protocol::{JSON, Message};

/// The file for the result of a task.
pub(super) struct ResultFile {
    /// Its path; without its ending, if the reply decides it.
    path: PathBuf,
    /// None: the body of the reply is written as it is.
    format: Option<FileFormat>,
    /// Whether the user named the file. Otherwise it is in a folder, gets an ending, and replaces no other.
    is_named: bool,
}

/// Gives each task its file.
#[derive(Clone)]
pub(super) struct ResultFiles {
    /// The file of the only task, or the folder for all.
    path: PathBuf,
    is_one: bool,
    /// The URL of tasks that name none.
    url: Option<String>,
    /// Whether `--url` replaces the URLs of tasks.
    replaces_url: bool,
    /// The format of files whose names have no ending.
    format: Option<FileFormat>,
    /// The number of the next task.
    next: u64,
    /// The formats of the names given so far, by the name without its ending; none: the reply decides the ending.
    names: HashMap<String, Vec<Option<FileFormat>>>,
}

impl ResultFiles {
    /// The files of a command: `path` itself if there is one task, else files in the folder `path`. `url` is that of tasks
    /// that name none, as far as it is known.
    ///
    /// # Errors
    /// The path cannot be written to, or its ending is that of no format.
    pub(super) fn new(
        path: &Path,
        arguments: &Publish,
        url: Option<&str>,
        total: Option<u64>,
    ) -> anyhow::Result<Self> {
        let shown = path.display();
        let name = path.file_name().and_then(|it| it.to_str()).unwrap_or_default();
        let is_one = total == Some(1) && !path.is_dir();
        let named = FileFormat::of_name(name);
        let mut format = arguments.format;
        if is_one {
            // Found now, and not after the reply has been computed.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
                bail!("{} is no folder, so {shown} cannot be written", folder.display());
            }
            let has_ending = path.extension().is_some();
            if named.is_none() && has_ending {
                let endings = FileFormat::endings(&FileFormat::ALL.map(|(format, _)| format));
                bail!("--output {shown}: a result is written as {endings}, or without an ending as it is");
            }
            if let (Some(named), Some(format)) = (named, format)
                && named != format
            {
                bail!("--output {shown} is not .{}, as --format says", format.ending());
            }
            format = named.or(format);
        } else if let Some(named) = named.filter(|_| !path.is_dir()) {
            let ending = named.ending();
            bail!(
                "--output {shown} names one .{ending} file, and there are several tasks, or their number is not known: \
                 give a folder"
            );
        } else if path.symlink_metadata().is_ok() && !path.is_dir() {
            bail!("--output {shown} is no folder, and there are several tasks, or their number is not known");
        }
        if arguments.input.is_none() && url == Some(IMAGE_GENERATION_URL) {
            format = format.or(Some(FileFormat::Png));
        }
        Ok(Self {
            path: path.to_owned(),
            is_one,
            url: url.map(str::to_owned),
            replaces_url: arguments.url.is_some(),
            format,
            next: 0,
            names: HashMap::new(),
        })
    }

    /// Checks the names of these requests.
    ///
    /// # Errors
    /// As [`file_for`](Self::file_for).
    pub(super) fn check(&self, requests: Requests) -> anyhow::Result<()> {
        let mut files = self.clone();
        for request in requests {
            // A line that cannot be read ends the run when it is reached.
            let Ok(mut request) = request else { return Ok(()) };
            files.file_for(&mut request)?;
        }
        Ok(())
    }

    /// The file for the result of the next request, which is made to ask for the file's format.
    ///
    /// # Errors
    /// The name cannot be that of a file, or is that of another one; or the reply cannot have the format.
    pub(super) fn file_for(&mut self, request: &mut Request) -> anyhow::Result<ResultFile> {
        let number = self.next;
        self.next += 1;
        let own_url = request.url.as_deref().filter(|_| !self.replaces_url);
        let url = own_url.or(self.url.as_deref()).map(str::to_owned);
        let (path, format) = if self.is_one {
            (self.path.clone(), self.format)
        } else {
            self.named(number, url.as_deref(), request)?
        };
        if let Some(format) = format {
            let asked = format.ask(url.as_deref(), &mut request.body);
            asked.map_err(|problem| anyhow!("task {number}, {}: {problem}", path.display()))?;
        }
        Ok(ResultFile { path, format, is_named: self.is_one })
    }

    /// The path and the format of a file in the folder.
    fn named(
        &mut self,
        number: u64,
        url: Option<&str>,
        request: &Request,
    ) -> anyhow::Result<(PathBuf, Option<FileFormat>)> {
        let name = match (&request.custom_id, &request.name) {
            (Some(id), _) => id.clone(),
            (None, Some(name)) => name.clone(),
            (None, None) => number.to_string(),
        };
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
            bail!("task {number}: {name:?} cannot be the name of a file in {}", self.path.display());
        }
        // Only an id may have an ending: that of a file which was sent is gone.
        let by_name = request.custom_id.as_deref().and_then(FileFormat::of_name);
        if let (Some(named), Some(format)) = (by_name, self.format)
            && named != format
        {
            bail!("task {number}: {name:?} is not .{}, as --format says", format.ending());
        }
        let stem = match (by_name, name.rsplit_once('.')) {
            (Some(_), Some((stem, _))) => stem.to_owned(),
            _ => name,
        };
        let format = by_name.or(self.format).or_else(|| FileFormat::asked_by(&request.body));
        let path = match format {
            Some(format) => self.path.join(format!("{stem}.{}", format.ending())),
            None => self.path.join(&stem),
        };
        let formats = self.names.entry(stem.clone()).or_default();
        if formats.iter().any(|other| *other == format || other.is_none() || format.is_none()) {
            bail!("task {number}: another task has the same name, {}", path.display());
        }
        formats.push(format);
        // Found now, and not after the reply has been computed.
        let may_be = |format: &FileFormat| path.with_file_name(format!("{stem}.{}", format.ending()));
        let paths: Vec<PathBuf> = match format {
            Some(_) => vec![path.clone()],
            None => FileFormat::of_url(url).iter().map(may_be).collect(),
        };
        if let Some(taken) = paths.iter().find(|path| path.symlink_metadata().is_ok() && !is_special(path)) {
            bail!("task {number}: {} exists already; remove it, or give another folder", taken.display());
        }
        Ok((path, format))
    }
}

impl ResultFile {
    /// Writes the result in a reply. Returns why it cannot be written, if it cannot.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn write(&self, reply: &Message) -> anyhow::Result<Option<String>> {
        let content = match self.format.map(|format| format.content_of(&body_value(reply))) {
            Some(Err(problem)) => return Ok(Some(problem)),
            Some(Ok(content)) => content,
            None => reply.body.to_vec(),
        };
        let mut path = self.path.clone();
        if self.format.is_none() && !self.is_named {
            let mut name = path.into_os_string();
            name.push(format!(".{}", ending(&reply.media_type().unwrap_or_default())));
            path = name.into();
        }
        let written = if self.is_named { write_whole(&path, &content) } else { write_new(&path, &content) };
        match written {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Ok(Some(format!("{} exists already", path.display())))
            }
            written => written.map(|()| None).with_context(|| path.display().to_string()),
        }
    }
}

/// The ending of a file of this media type.
fn ending(media_type: &str) -> &str {
    match media_type {
        "" | JSON => "json",
        "text/plain" => "txt",
        // Whoever answers writes it, so that it may be anything.
        other => other
            .rsplit('/')
            .next()
            .filter(|kind| (1..=32).contains(&kind.len()))
            .filter(|kind| kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-".contains(&byte)))
            .unwrap_or("bin"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::protocol::Properties;
    use crate::protocol::endpoints::TRANSCRIPTIONS_URL;

    fn files(path: &Path, flags: &[&str], total: Option<u64>) -> anyhow::Result<ResultFiles> {
        let arguments = ["sconce", "publish", "--output", path.to_str().unwrap(), "--input", "-"];
        let cli = Cli::parse_from([&arguments, flags].concat());
        let Command::Publish(arguments) = cli.command else { panic!("publish") };
        ResultFiles::new(path, &arguments, Some(TRANSCRIPTIONS_URL), total)
    }

    fn request(custom_id: Option<&str>, name: Option<&str>, body: &str) -> Request {
        let (custom_id, name) = (custom_id.map(str::to_owned), name.map(str::to_owned));
        Request { custom_id, url: None, name, body: body.to_owned().into() }
    }

    fn reply(content_type: &str, body: &str) -> Message {
        let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
        Message { properties, body: body.to_owned().into() }
    }

    #[test]
    fn the_ending_of_the_only_file_decides_the_format_or_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("episode 1.srt");
        let mut sound = request(None, Some("episode 1"), r#"{"file_url":"data:,"}"#);
        let file = files(&path, &[], Some(1)).unwrap().file_for(&mut sound).unwrap();
        assert_eq!(&sound.body[..], br#"{"file_url":"data:,","response_format":"srt"}"#);
        let problem = file.write(&reply("application/json", r#"{"text":"a"}"#)).unwrap().unwrap();
        assert!(problem.contains("cannot be written as .srt") && !path.exists(), "{problem}");
        assert_eq!(file.write(&reply("text/plain", "1\n")).unwrap(), None);
        assert_eq!(std::fs::read(&path).unwrap(), b"1\n");
        let refused = |name: &str, flags: &[&str], total| {
            files(&folder.path().join(name), flags, total).err().unwrap().to_string()
        };
        assert!(refused("c.jpg", &[], Some(1)).contains(".png"));
        assert!(refused("c.srt", &["--format", "vtt"], Some(1)).contains("not .vtt"));
        assert!(refused("c.srt", &[], Some(3)).contains("give a folder"));
        assert!(refused("no/c.srt", &[], Some(1)).contains("is no folder"));
        let png = files(&folder.path().join("c.png"), &[], Some(1)).unwrap().file_for(&mut sound);
        assert!(png.err().unwrap().to_string().contains("only as .txt, .srt, .vtt, .json"));
        let mut plain = request(None, None, "{}");
        let file = files(&folder.path().join("c"), &[], Some(1)).unwrap().file_for(&mut plain).unwrap();
        assert_eq!(file.write(&reply("application/json", "{}")).unwrap(), None);
        assert_eq!(std::fs::read(folder.path().join("c")).unwrap(), b"{}", "as it is");
    }

    #[test]
    fn files_in_a_folder_are_named_after_ids_and_inputs_and_none_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let open = |flags: &[&str]| files(folder.path(), flags, Some(9)).unwrap();
        let mut all = open(&[]);
        let mut name = |custom_id, name, body: &str| {
            let file = all.file_for(&mut request(custom_id, name, body))?;
            Ok::<_, anyhow::Error>(file.path.file_name().unwrap().to_str().unwrap().to_owned())
        };
        assert_eq!(name(Some("a.srt"), None, "{}").unwrap(), "a.srt");
        assert_eq!(name(Some("a.vtt"), None, "{}").unwrap(), "a.vtt");
        assert_eq!(name(Some("b"), None, r#"{"response_format":"srt"}"#).unwrap(), "b.srt");
        assert_eq!(name(None, Some("episode 1"), "{}").unwrap(), "episode 1");
        assert_eq!(name(None, None, "{}").unwrap(), "4");
        for (id, problem) in [
            ("a.srt", "another task has the same name"),
            ("a", "another task has the same name"),
            ("4", "another task has the same name"),
            ("../a", "cannot be the name"),
            ("", "cannot be the name"),
        ] {
            let error = name(Some(id), None, "{}").unwrap_err().to_string();
            assert!(error.contains(problem), "{id}: {error}");
        }
        let conflict = name(Some("c.srt"), None, r#"{"response_format":"vtt"}"#).unwrap_err().to_string();
        assert!(conflict.contains("asks for .vtt"), "{conflict}");
        let file = open(&["--format", "srt"]).file_for(&mut request(None, Some("x"), "{}")).unwrap();
        assert_eq!(file.write(&reply("text/plain", "1\n")).unwrap(), None);
        assert!(file.write(&reply("text/plain", "2\n")).unwrap().unwrap().contains("exists already"));
        assert_eq!(std::fs::read(folder.path().join("x.srt")).unwrap(), b"1\n");
        let again = open(&["--format", "srt"]).file_for(&mut request(None, Some("x"), "{}"));
        assert!(again.err().unwrap().to_string().contains("exists already; remove it"));
        let unnamed = open(&[]).file_for(&mut request(Some("y"), None, "{}")).unwrap();
        assert_eq!(unnamed.write(&reply("audio/wav", "RIFF")).unwrap(), None);
        assert!(folder.path().join("y.wav").exists(), "the reply decides the ending");
        // A transcript cannot become y.wav, but z.json.
        assert!(open(&[]).file_for(&mut request(Some("y"), None, "{}")).is_ok());
        std::fs::write(folder.path().join("z.json"), "{}").unwrap();
        let again = open(&[]).file_for(&mut request(None, Some("z"), "{}")).err().unwrap().to_string();
        assert!(again.contains("z.json exists already; remove it"), "{again}");
    }
}
