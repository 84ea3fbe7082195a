//! The file of `sconce publish --output`: which format it has, and whether it can be written. A file that is there is
//! replaced as a whole, once its content is known.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};

use super::requests::Request;
use crate::client::whole_file::write_whole;
use crate::protocol::Message;
use crate::protocol::batch_line::body_value;
use crate::protocol::endpoints::IMAGE_GENERATION_URL;
use crate::protocol::results::FileFormat;

/// The file for the result of a task.
pub(super) struct ResultFile {
    path: PathBuf,
    /// None: the body of the reply is written as it is.
    format: Option<FileFormat>,
}

impl ResultFile {
    /// The file at `path` for the result of a request, which is made to ask for the file's format. `url` is that of the
    /// request, as far as it is known.
    ///
    /// # Errors
    /// The path cannot be written to, its ending is that of no format, or the reply cannot have the format. This is found
    /// now, and not after the reply has been computed.
    pub(super) fn new(path: &Path, url: Option<&str>, request: &mut Request) -> anyhow::Result<Self> {
        let shown = path.display();
        if path.is_dir() {
            bail!("--output {shown} is a folder: name a file in it");
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            bail!("{} is no folder, so {shown} cannot be written", folder.display());
        }
        let named = path.file_name().and_then(|name| FileFormat::of_name(name.to_str()?));
        if named.is_none() && path.extension().is_some() {
            let endings = FileFormat::endings(&FileFormat::ALL.map(|(format, _)| format));
            bail!("--output {shown}: a result is written as {endings}, or without an ending as it is");
        }
        let format = named.or((url == Some(IMAGE_GENERATION_URL)).then_some(FileFormat::Png));
        if let Some(format) = format {
            format.ask(url, &mut request.body).map_err(|problem| anyhow!("{shown}: {problem}"))?;
        }
        Ok(Self { path: path.to_owned(), format })
    }

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
        write_whole(&self.path, &content).with_context(|| self.path.display().to_string())?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;
    use crate::protocol::endpoints::TRANSCRIPTIONS_URL;

    fn request(body: &str) -> Request {
        Request { custom_id: None, url: None, body: body.to_owned().into() }
    }

    fn reply(content_type: &str, body: &str) -> Message {
        let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
        Message { properties, body: body.to_owned().into() }
    }

    #[test]
    fn the_ending_of_the_file_decides_the_format_or_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, request: &mut Request| {
            ResultFile::new(&folder.path().join(name), Some(TRANSCRIPTIONS_URL), request)
        };
        let path = folder.path().join("episode 1.srt");
        let mut sound = request(r#"{"file_url":"data:,"}"#);
        let subtitles = file("episode 1.srt", &mut sound).unwrap();
        assert_eq!(&sound.body[..], br#"{"file_url":"data:,","response_format":"srt"}"#);
        let problem = subtitles.write(&reply("application/json", r#"{"text":"a"}"#)).unwrap().unwrap();
        assert!(problem.contains("cannot be written as .srt") && !path.exists(), "{problem}");
        assert_eq!(subtitles.write(&reply("text/plain", "1\n")).unwrap(), None);
        assert_eq!(std::fs::read(&path).unwrap(), b"1\n");
        let refused = |name: &str, body: &str| file(name, &mut request(body)).err().unwrap().to_string();
        assert!(refused("c.jpg", "{}").contains(".png"));
        assert!(refused("no/c.srt", "{}").contains("is no folder"));
        assert!(refused("", "{}").contains("is a folder"));
        assert!(refused("c.png", "{}").contains("only as .txt, .srt, .vtt, .json"));
        assert!(refused("c.srt", r#"{"response_format":"vtt"}"#).contains("asks for .vtt"));
        let plain = file("c", &mut request("{}")).unwrap();
        assert_eq!(plain.write(&reply("application/json", "{}")).unwrap(), None);
        assert_eq!(std::fs::read(folder.path().join("c")).unwrap(), b"{}", "as it is");
    }
}
